"""Plans the steps of a run ahead of the training loop.

One background thread draws batches and plans them in order, so what it yields depends on the seed
and the configuration alone, never on timing. A step can depend on the one before it (samples that
did not fit are carried over), which is why the thread is one.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Protocol

from megatron_nsp.cost.score import PlanScore
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.order import ALL_ROOT_FIRST, NodeOrders
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples
from megatron_nsp.steps.sampler import Batch, BatchSampler

PlanLengths = Callable[[IntArray], tuple[Plan, PlanScore]]
PlanBatch = Callable[[Batch], tuple[Plan, PlanScore]]
MarkSaved = Callable[[Plan], SavedSamples]
OrderNodes = Callable[[Plan], NodeOrders]
CarriedOf = Callable[[Batch], IntArray]


def plan_carried_first(batch: Batch, plan_lengths: PlanLengths) -> tuple[Plan, PlanScore]:
    """Plans a batch so that samples carried from the step before run now.

    Where not everything fits, the planner carries the shortest samples. Left to itself it would
    carry the same short ones again and again. So when one of them would have to wait once more, the
    samples drawn last wait instead: fewer and fewer of the new ones are planned until all of the
    carried ones run.

    Args:
        batch: the batch; its first `num_carried` samples were carried before.
        plan_lengths: plans lengths; a pure function.
    """
    plan, score = plan_lengths(batch.lengths)
    num_kept = len(batch.lengths)
    while num_kept > batch.num_carried and (plan.carried < batch.num_carried).any():
        num_kept = batch.num_carried + (num_kept - batch.num_carried) * 3 // 4
        kept, score = plan_lengths(batch.lengths[:num_kept])
        plan = kept.followed_by(batch.lengths[num_kept:])
    return plan, score


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One step, ready to run.

    Attributes:
        number: steps of the run before this one.
        batch: its samples.
        plan: their plan; sample j is `batch.documents[j]`.
        score: what the cost model says about the plan.
        plan_ms: time it took to draw and plan, in the background or not.
        waited_ms: part of that time the training loop waited for.
        saved: samples whose attention output is saved where layers are recomputed.
        orders: in which order each tree runs its nodes.
    """

    number: int
    batch: Batch
    plan: Plan
    score: PlanScore
    plan_ms: float
    waited_ms: float = 0.0
    saved: SavedSamples = NOTHING_SAVED
    orders: NodeOrders = ALL_ROOT_FIRST

    @property
    def num_samples(self) -> int:
        """Samples that run in this step."""
        return self.plan.num_samples - len(self.plan.carried)

    @property
    def num_tokens(self) -> int:
        """Tokens that run in this step."""
        return int(self.plan.lengths.sum() - self.plan.lengths[self.plan.carried].sum())

    @property
    def num_targets(self) -> int:
        """Tokens with a target: all but the last of each sample."""
        return self.num_tokens - self.num_samples

    @property
    def digest(self) -> str:
        """SHA-256 over all that ranks must agree on: number, documents, plan, marks and orders."""
        marks = sorted(self.saved.num_saved.items())
        state = hashlib.sha256(f"{self.number} {self.plan.digest} {marks} ".encode())
        state.update(self.batch.documents.astype("<i8").tobytes())
        state.update(self.orders.text.encode())
        return state.hexdigest()


class Steps(Protocol):
    """Planned steps, one after the other."""

    def next_step(self) -> PlannedStep:
        """The next step."""

    def close(self) -> None:
        """Ends what makes them."""


class RepeatedSteps:
    """The same steps over and over.

    Args:
        steps: at least one.
    """

    def __init__(self, steps: Iterable[PlannedStep]) -> None:
        """Starts at the first."""
        self._steps = cycle(steps)

    def next_step(self) -> PlannedStep:
        """The next step; after the last the first again."""
        return next(self._steps)

    def close(self) -> None:
        """Nothing runs."""


class StepPlanner:
    """Yields the planned steps of a run in order.

    Args:
        sampler: draws the batches.
        plan_batch: plans a batch; a pure function.
        plan_ahead: steps kept planned ahead; 0 plans in the caller's thread.
        carried_of: samples of a batch that its plan carries over, asked for steps that are skipped;
            without it plans carry nothing, and skipped steps are not planned.
        first_step: steps to skip, for a run that resumes.
        mark_saved: marks what a plan saves; a pure function.
        order_nodes: chooses the order of nodes; a pure function. Root first without it.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        plan_batch: PlanBatch,
        plan_ahead: int,
        carried_of: CarriedOf | None = None,
        first_step: int = 0,
        mark_saved: MarkSaved = lambda plan: NOTHING_SAVED,
        order_nodes: OrderNodes = lambda plan: ALL_ROOT_FIRST,
    ) -> None:
        """Skips to `first_step`; planning starts with the first call of `next_step`."""
        self._mark_saved = mark_saved
        self._sampler, self._plan_batch, self._plan_ahead = sampler, plan_batch, plan_ahead
        self._order_nodes = order_nodes
        self._number = 0
        self._ahead: deque[Future[PlannedStep]] = deque()
        self._thread = ThreadPoolExecutor(1, "nsp-planner") if plan_ahead else None
        for _ in range(first_step):
            batch = self._sampler.draw()
            if carried_of is not None:
                self._sampler.carry(batch.documents[carried_of(batch)])
            self._number += 1

    def next_step(self) -> PlannedStep:
        """The next step; `waited_ms` says how long the caller was kept."""
        started = time.perf_counter()
        if self._thread is None:
            step = self._plan()
        else:
            while len(self._ahead) < self._plan_ahead:
                self._ahead.append(self._thread.submit(self._plan))
            step = self._ahead.popleft().result()
            self._ahead.append(self._thread.submit(self._plan))
        waited_ms = (time.perf_counter() - started) * 1e3
        return replace(step, waited_ms=waited_ms)

    def close(self) -> None:
        """Stops planning ahead."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _plan(self) -> PlannedStep:
        started = time.perf_counter()
        batch = self._sampler.draw()
        plan, score = self._plan_batch(batch)
        self._sampler.carry(batch.documents[plan.carried])
        orders = self._order_nodes(plan)
        number, self._number = self._number, self._number + 1
        saved = self._mark_saved(plan)
        plan_ms = (time.perf_counter() - started) * 1e3
        return PlannedStep(number, batch, plan, score, plan_ms, saved=saved, orders=orders)
