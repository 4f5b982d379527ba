"""How a rank comes by the tokens, labels and loss mask of its buffer.

A reader is called for every micro-batch, on all ranks of the domain in one order and before the
forward pass, so it may communicate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.mcore.documents import Documents
from megatron_nsp.plan.layout import RankLayout
from megatron_nsp.plan.static_layout import static_layout
from megatron_nsp.runtime.attention import NestedBatch
from megatron_nsp.runtime.reshard import ReshardMap, to_plan
from megatron_nsp.steps.step_planner import PlannedStep


class TokenRows(NamedTuple):
    """The rows of a buffer, `[T]` each, on the device of the job.

    Attributes:
        tokens: int64 token ids; 0 in filler rows.
        labels: int64 the token after each token in its document; 0 without a target.
        loss_mask: float32, 1 where there is a target.
        further: int64 the tokens after the label, the nearest first; 0 after a document's end.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    further: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class EndOfDocument:
    """What Megatron's flags do at its end-of-document token, where one lies inside a document.

    Attributes:
        token: the token.
        is_masked: whether no loss is taken of the token that follows it (`--eod-mask-loss`).
        restarting_flag: a flag that asks for positions or attention to begin anew behind it.
    """

    token: int
    is_masked: bool
    restarting_flag: str | None

    def mask(self, name: str, start: int, tokens: np.ndarray) -> np.ndarray:
        """`[n]` float32 loss mask of tokens of a document that have a target.

        Args:
            name: what the document is called, for the error.
            start: place of the first of the tokens.
            tokens: `[n]` the tokens.

        Raises:
            ValueError: the token lies where a document would have to be cut in two.
        """
        is_end = tokens == self.token
        if self.restarting_flag is not None and is_end.any():
            raise ValueError(
                f"{self.restarting_flag} would cut {name} after the end-of-document token "
                f"{self.token} at place {start + int(is_end.argmax())}: positions and attention "
                "begin anew with every document of the index, and nowhere else"
            )
        return np.where(is_end & self.is_masked, np.float32(0.0), np.float32(1.0))


ReadRows = Callable[[PlannedStep, NestedBatch], TokenRows]


def read_tokens(
    layout: RankLayout,
    step_documents: np.ndarray,
    lengths: np.ndarray,
    documents: Documents,
    num_further: int = 0,
    end: EndOfDocument | None = None,
) -> tuple[np.ndarray, ...]:
    """Tokens, labels, loss mask and further tokens of a rank's buffer, `[T]` each.

    Labels are the documents' own next tokens, so a target may lie beyond the rank's slice; the last
    token of a document has none.

    Args:
        layout: what the rank holds.
        step_documents: `[n]` document of each sample.
        lengths: `[n]` tokens of each sample.
        documents: where to read.
        num_further: how many tokens after the label to bring.
        end: what the end of a document does inside of one; nothing without it.
    """
    rows = layout.buffer_tokens
    ahead = np.zeros((2 + num_further, rows), dtype=np.int64)  # row k: the token k after each
    loss_mask = np.zeros(rows, dtype=np.float32)
    row = 0
    for sample, start, stop in layout.segments:
        last = int(lengths[sample])
        document = int(step_documents[sample])
        read = documents.read(document, start, min(stop + 1 + num_further, last))
        for steps, tokens in enumerate(ahead):
            known = read[steps : steps + stop - start]
            tokens[row : row + len(known)] = known
        num_targets = min(stop, last - 1) - start
        loss_mask[row : row + num_targets] = (
            1.0 if end is None else end.mask(documents.name_of(document), start, read[:num_targets])
        )
        row += stop - start
    tokens, labels, *further = ahead
    return tokens, labels, loss_mask, *further


@dataclass(frozen=True)
class PlanReader:
    """Reads just what the plan gives the rank.

    Attributes:
        documents: where to read.
        num_further: how many tokens after the label to bring.
        end: what the end of a document does inside of one.
    """

    documents: Documents
    num_further: int = 0
    end: EndOfDocument | None = None

    def __call__(self, step: PlannedStep, nested: NestedBatch) -> TokenRows:
        """The rows of a micro-batch; communicates nothing."""
        batch = step.batch
        columns = read_tokens(
            nested.layout,
            batch.documents,
            batch.lengths,
            self.documents,
            self.num_further,
            self.end,
        )
        tokens, labels, loss_mask, *further = map(on_device, columns)
        return TokenRows(tokens, labels, loss_mask, tuple(further))


@dataclass(frozen=True, eq=False)
class StaticReader:
    """Reads as a loader that knows one fixed degree and no plan, then reshards.

    Attributes:
        documents: where to read.
        degree: ranks of a static group.
        row_multiple: buffers of the plan are filled to a multiple of this many rows.
        group: the domain's group.
        num_further: how many tokens after the label to bring.
        end: what the end of a document does inside of one.
    """

    documents: Documents
    degree: int
    row_multiple: int
    group: dist.ProcessGroup
    num_further: int = 0
    end: EndOfDocument | None = None

    def __call__(self, step: PlannedStep, nested: NestedBatch) -> TokenRows:
        """The rows of a micro-batch; one all-to-all for all of them together."""
        batch, rank = step.batch, nested.layout.rank
        layout = static_layout(step.plan, rank, self.degree, nested.micro_batch)
        columns = read_tokens(
            layout, batch.documents, batch.lengths, self.documents, self.num_further, self.end
        )
        reshard_map = ReshardMap.build(
            step.plan, nested.micro_batch, rank, self.degree, self.row_multiple
        )
        # The loss mask is 0 or 1, so it travels as a third column of integers.
        x_static = on_device(np.stack(columns, axis=1).astype(np.int64))
        tokens, labels, loss_mask, *further = to_plan(
            x_static, reshard_map, self.group
        ).T.contiguous()
        return TokenRows(tokens, labels, loss_mask.float(), tuple(further))


def on_device(values: np.ndarray) -> Tensor:
    """The values on the device of the job."""
    return torch.from_numpy(values).to("cuda", non_blocking=True)
