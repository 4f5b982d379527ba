"""The iterator Megatron's loop draws from: one planned micro-batch after the other.

Every rank runs the same StepPlanner and a reader that brings the tokens of its own slices. Before
the first collective of a step the ranks of the domain have compared the step's digest: the one
collective that runs beside others, on Megatron's own data-parallel group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megatron_nsp.mcore.further_tokens import (
    FurtherTokens,
    further_tokens,
    with_filler_token,
)
from megatron_nsp.mcore.readers import ReadRows, on_device
from megatron_nsp.runtime.attention import NestedBatch
from megatron_nsp.steps.step_planner import PlannedStep, Steps


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one rank feeds to the model in one micro-batch; never changed after it is yielded.

    Shapes: T rows of the rank's buffer.

    Attributes:
        nested: the micro-batch's part of the plan.
        step_has_targets: whether any rank has a target in this step.
        tokens: `[1, T]` int64 token ids; the filler token in filler rows.
        labels: `[1, T]` int64 the token after each token in its document; 0 without a target.
        loss_mask: `[1, T]` float32, 1 where there is a target.
        positions: `[T]` int64 place of each token in its own sample.
        further: what each depth of multi-token prediction sees, depth 1 first.
    """

    nested: NestedBatch
    step_has_targets: bool
    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    further: tuple[FurtherTokens, ...] = ()


class NestedDataIterator:
    """Yields the micro-batches of one rank, for ever.

    Args:
        steps: the planned steps.
        read: brings the rows of this rank's buffer.
        rank: this rank in the domain.
        row_multiple: buffers are filled to a multiple of this many rows.
        overlap: stream the phases of consecutive nodes.
        on_step: called with each step before its first micro-batch, on every rank.
        filler_token: token of filler rows.
    """

    def __init__(
        self,
        steps: Steps,
        read: ReadRows,
        rank: int,
        row_multiple: int,
        overlap: bool,
        on_step: Callable[[PlannedStep], None],
        filler_token: int = 0,
    ) -> None:
        """Plans nothing yet."""
        self._steps, self._read, self._rank = steps, read, rank
        self._row_multiple, self._overlap, self._on_step = row_multiple, overlap, on_step
        self._filler_token = filler_token
        self._micro_batches = self._run()

    def __iter__(self) -> Iterator[MicroBatch]:
        """The iterator itself."""
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch of the run."""
        return next(self._micro_batches)

    def close(self) -> None:
        """Stops planning ahead."""
        self._steps.close()

    def _run(self) -> Iterator[MicroBatch]:
        # A step's digest is compared while the step before runs, so that no rank waits for it.
        ahead = self._plan_next()
        while True:
            if isinstance(ahead, Exception):
                raise ahead
            step, ahead = ahead.agreed_step(), self._plan_next()
            self._on_step(step)
            for micro_batch in range(step.plan.num_micro_batches):
                yield self._load(step, micro_batch)

    def _plan_next(self) -> "DigestComparison | Exception":
        """The next step on its way; or why there is none, to be told when that step is due."""
        try:
            return DigestComparison(self._steps.next_step())
        except Exception as error:
            return error

    def _load(self, step: PlannedStep, micro_batch: int) -> MicroBatch:
        nested = NestedBatch.build(
            step.plan,
            self._rank,
            micro_batch,
            self._row_multiple,
            self._overlap,
            step.saved,
            orders=step.orders.of_rank(micro_batch, step.plan.tree, self._rank),
        )
        layout, rows = nested.layout, self._read(step, nested)
        return MicroBatch(
            nested=nested,
            step_has_targets=step.num_targets > 0,
            tokens=with_filler_token(rows.tokens, layout, self._filler_token).unsqueeze(0),
            labels=rows.labels.unsqueeze(0),
            loss_mask=rows.loss_mask.unsqueeze(0),
            positions=on_device(layout.positions),
            further=further_tokens(rows, layout, step.batch.lengths, self._filler_token),
        )


class DigestComparison:
    """Compares one step's digest over the domain, in the background; one small collective.

    Not over the whole job: a later pipeline stage asks for its data only when the stage before has
    sent its activations, so the two would wait for one another.

    Args:
        step: the planned step.
    """

    def __init__(self, step: PlannedStep) -> None:
        """Starts the comparison; every rank of the domain must."""
        self._step = step
        number = int(step.digest[:15], 16)  # 60 bits fit into int64 with either sign
        self._extremes = torch.tensor([number, -number], dtype=torch.int64, device="cuda")
        self._work = dist.all_reduce(
            self._extremes,
            op=dist.ReduceOp.MAX,
            group=mpu.get_data_parallel_group(),
            async_op=True,
        )

    def agreed_step(self) -> PlannedStep:
        """The step, once all ranks are known to agree on it.

        Raises:
            RuntimeError: the plans differ, on all ranks alike.
        """
        self._work.wait()
        highest, lowest = self._extremes[0].item(), -self._extremes[1].item()
        if highest != lowest:
            raise RuntimeError(
                f"plans of step {self._step.number + 1} differ between ranks (this one: "
                f"{self._step.digest[:15]}); every rank must see the same data, seed, flags and "
                "package versions"
            )
        return self._step
