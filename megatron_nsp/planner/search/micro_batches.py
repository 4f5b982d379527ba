"""Spreading a batch over the micro-batches of a step, under the token budget.

A batch uses as few micro-batches as hold it. A further one never makes a step faster: the loads of
two micro-batches merged into one add up to no more, and they share their nodes' latency. So one is
opened for the token budget alone; the rest of the run's fixed number are filler micro-batches.

What they cannot hold is carried to the next step. Samples are taken longest first, equal ones by
number, so that the shortest and last are carried. The longest always fits an empty micro-batch, so
every step makes progress; carried samples count towards the next batch, so they do not pile up.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_nsp.cost.score import PlanScore, SampleTimes
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.planner.search.placement import UNPLACED, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem

MicroBatchPolicy = Callable[[MicroBatchProblem], Placement]
"""Places the samples of one micro-batch."""


@dataclass(frozen=True, eq=False)
class BatchProblem:
    """The samples of a step, longest first.

    Attributes:
        times: their times.
        token_budget: the most tokens a rank may hold in a micro-batch; None = no limit.
    """

    times: SampleTimes
    token_budget: int | None

    @cached_property
    def in_one_micro_batch(self) -> MicroBatchProblem:
        """The problem of placing all samples in one micro-batch."""
        return MicroBatchProblem.from_times(self.times, self.token_budget)

    @property
    def lengths(self) -> IntArray:
        """`[n]` tokens of each sample, descending."""
        return self.times.lengths

    def take(self, samples: IntArray) -> "BatchProblem":
        """The batch of some of the samples, in ascending order."""
        if len(samples) == len(self.lengths):
            return self
        return BatchProblem(self.times.take(samples), self.token_budget)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Where the samples of a batch go, longest first.

    Attributes:
        column: `[n]` column of each sample's degree.
        index: `[n]` index of its node among those of the degree.
        micro_batch: `[n]` its micro-batch; `CARRIED` (-1) for samples without a place.
        num_micro_batches_used: micro-batches that hold samples.
    """

    column: IntArray
    index: IntArray
    micro_batch: IntArray
    num_micro_batches_used: int

    @classmethod
    def of_placements(
        cls, num_samples: int, placements: Iterable[tuple[IntArray, Placement]]
    ) -> "Assignment":
        """One placement after the other, each of some of the samples and a micro-batch.

        Samples that a placement has no node for stay without a place, unless a later one has one;
        micro-batches without samples are left out.
        """
        column = np.zeros(num_samples, dtype=np.int64)
        index = np.zeros(num_samples, dtype=np.int64)
        micro_batch = np.full(num_samples, CARRIED, dtype=np.int64)
        number = 0
        for samples, placement in placements:
            has_node = placement.index != UNPLACED
            placed = samples[has_node]
            column[placed], index[placed] = placement.column[has_node], placement.index[has_node]
            micro_batch[placed] = number
            number += len(placed) > 0
        return cls(column, index, micro_batch, number)

    @property
    def placed(self) -> IntArray:
        """Samples with a place."""
        return np.flatnonzero(self.micro_batch != CARRIED)

    @property
    def is_complete(self) -> bool:
        """Whether every sample has a place."""
        return len(self.placed) == len(self.micro_batch)

    def score(self, times: SampleTimes, num_micro_batches: int) -> PlanScore:
        """The times of the step, filler micro-batches included."""
        return times.score(self.column, self.index, self.micro_batch, num_micro_batches)

    def among(self, samples: IntArray, num_samples: int) -> "Assignment":
        """The same for a batch of which these samples are a part; the others have no place."""
        if len(samples) == num_samples:
            return self
        columns = [np.zeros(num_samples, dtype=np.int64) for _ in range(2)]
        micro_batch = np.full(num_samples, CARRIED, dtype=np.int64)
        for whole, part in zip(
            (*columns, micro_batch), (self.column, self.index, self.micro_batch), strict=True
        ):
            whole[samples] = part
        return Assignment(columns[0], columns[1], micro_batch, self.num_micro_batches_used)

    def plan(self, batch: BatchProblem, order: IntArray, num_micro_batches: int) -> Plan:
        """The assignment as a plan; `order[i]` is the number in the batch of sample i."""
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return Plan(
            tree=batch.times.tree,
            lengths=batch.lengths[place],
            depth=batch.times.tree.depth_of_column(self.column[place]),
            index=self.index[place],
            micro_batch=self.micro_batch[place],
            num_micro_batches=num_micro_batches,
            token_budget=batch.token_budget,
        )


FILL_SHARES = (0.9, 0.7)
"""Shares of the token budget up to which micro-batches are filled one after the other."""

BatchPolicy = Callable[[BatchProblem, int], Assignment]
"""Places the samples of a batch in at most so many micro-batches."""


Refine = Callable[[MicroBatchProblem, Placement], Placement]
"""Makes a placement of the same samples faster."""


def as_batch_policy(policy: MicroBatchPolicy, refine: Refine | None = None) -> BatchPolicy:
    """A policy of micro-batches as one of batches; the micro-batches it settles on are refined."""

    def place(batch: BatchProblem, max_micro_batches: int) -> Assignment:
        settled = assign(batch, policy, max_micro_batches)
        return settled if refine is None else refined(batch, settled, refine)

    return place


def refined(batch: BatchProblem, assignment: Assignment, refine: Refine) -> Assignment:
    """The assignment with every micro-batch refined by itself."""
    column, index = assignment.column.copy(), assignment.index.copy()
    for number in range(assignment.num_micro_batches_used):
        samples = np.flatnonzero(assignment.micro_batch == number)
        problem = batch.take(samples).in_one_micro_batch
        placement = refine(problem, Placement(column[samples], index[samples], 0))
        column[samples], index[samples] = placement.column, placement.index
    return Assignment(column, index, assignment.micro_batch, assignment.num_micro_batches_used)


def assign(batch: BatchProblem, policy: MicroBatchPolicy, max_micro_batches: int) -> Assignment:
    """Lets a policy place a batch, in as few micro-batches as hold it.

    Returns:
        The faster complete assignment to the least number of micro-batches; if there is none,
        the one that carries the fewest tokens.
    """
    everything = np.arange(len(batch.lengths))
    if batch.token_budget is None:
        return _cascade(batch, policy, [everything])
    micro_batch_tokens = batch.token_budget * batch.times.tree.num_ranks
    least_micro_batches = min(
        max(1, -(-int(batch.lengths.sum()) // micro_batch_tokens)), max_micro_batches
    )
    tried: list[Assignment] = []
    for num_micro_batches in range(least_micro_batches, max_micro_batches + 1):
        partitions = _partitions(batch.lengths, num_micro_batches, micro_batch_tokens)
        tried = [_cascade(batch, policy, parts) for parts in partitions]
        complete = [assignment for assignment in tried if assignment.is_complete]
        if complete:
            return min(complete, key=lambda one: one.score(batch.times, num_micro_batches).load_us)
        # Each takes what it can; no more samples than the tokens of all can hold at best.
        kept = everything[np.cumsum(batch.lengths) <= num_micro_batches * micro_batch_tokens]
        tried.append(_cascade(batch, policy, [kept, *[everything[:0]] * (num_micro_batches - 1)]))
        if tried[-1].is_complete:
            return tried[-1]
        if tried[-1].num_micro_batches_used < num_micro_batches and len(kept) == len(everything):
            break  # the policy has left one empty: it has no place for the rest in any
    return min(tried, key=lambda one: int(batch.lengths[one.micro_batch == CARRIED].sum()))


def _partitions(
    lengths: IntArray, num_micro_batches: int, micro_batch_tokens: int
) -> Iterator[list[IntArray]]:
    """Ways to spread samples (longest first) over micro-batches of at most so many tokens."""
    num_samples = len(lengths)
    if num_micro_batches == 1:
        yield [np.arange(num_samples)]
        return
    # Long samples evenly over the micro-batches: 0 1 2 2 1 0 0 1 2 ...
    turn = np.arange(num_samples) % (2 * num_micro_batches)
    snake = np.minimum(turn, 2 * num_micro_batches - 1 - turn)
    yield [np.flatnonzero(snake == m) for m in range(num_micro_batches)]
    # Long samples together, so that they run side by side: consecutive runs of equal tokens.
    before = np.cumsum(lengths) - lengths
    run = before * num_micro_batches // int(lengths.sum())
    yield [np.flatnonzero(run == m) for m in range(num_micro_batches)]
    # As full as they get, the last with what remains: a long sample sets the time of its
    # micro-batch, which then had better be full of work.
    for share in FILL_SHARES:
        filled = np.minimum(
            before // max(int(share * micro_batch_tokens), 1), num_micro_batches - 1
        )
        if int(lengths[filled == num_micro_batches - 1].sum()) <= micro_batch_tokens:
            yield [np.flatnonzero(filled == m) for m in range(num_micro_batches)]


def _cascade(batch: BatchProblem, policy: MicroBatchPolicy, parts: list[IntArray]) -> Assignment:
    """Places the parts one after the other; each also gets what the one before had no room for."""

    def placements() -> Iterator[tuple[IntArray, Placement]]:
        left = np.zeros(0, dtype=np.int64)
        for part in parts:
            samples = np.sort(np.concatenate([left, part]))
            placement = policy(batch.take(samples).in_one_micro_batch)
            left = samples[placement.unplaced]
            yield samples, placement

    return Assignment.of_placements(len(batch.lengths), placements())
