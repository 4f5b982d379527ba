"""The task that the search and every policy solve: place the samples of one micro-batch.

Times are whole nanoseconds from here on: integer sums do not depend on their order, so plans are
the same bits on every machine. Samples are sorted longest first, ties by sample number.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_nsp.cost.bounds import lower_bound_us, work_bound_us
from megatron_nsp.cost.score import SampleTimes
from megatron_nsp.plan.arrays import BoolArray, IntArray
from megatron_nsp.plan.tree import SPTree

_NEVER = np.iinfo(np.int64).max
_MOST_NS = 2.0**52  # float64 still holds whole nanoseconds, and int64 a node's number beside them


@dataclass(frozen=True, eq=False)
class MicroBatchProblem:
    """The samples of one micro-batch, longest first, with their times in nanoseconds.

    Attributes:
        tree: the SP tree; column k of the arrays is the degree `tree.degrees[k]`.
        lengths: `[n]` tokens, descending.
        fwd_ns: `[n, K+1]` what a sample adds to every rank of its node in a forward pass.
        bwd_ns: `[n, K+1]` the same in a backward pass.
        total_ns: `[n, K+1]` both passes.
        latency_ns: `[K+1]` what an active node adds to each of its ranks in one pass.
        token_budget: the most tokens a rank may hold; None = no limit.
        bound_us: a lower bound of the load, without bias and node latency.
        expert_ns: `[n, 2]` work of each sample's experts in both passes, on one rank.
        shares_experts: `[K+1]` whether nodes of a degree share that work with a whole group.
        expert_degree: ranks of an expert-parallel group.
    """

    tree: SPTree
    lengths: IntArray
    fwd_ns: IntArray
    bwd_ns: IntArray
    total_ns: IntArray
    latency_ns: IntArray
    token_budget: int | None
    bound_us: float
    expert_ns: IntArray
    shares_experts: BoolArray
    expert_degree: int

    @classmethod
    def from_times(cls, times: SampleTimes, token_budget: int | None) -> "MicroBatchProblem":
        """The problem of placing the samples of `times`, which are sorted longest first.

        Raises:
            ValueError: the work is too much to count in nanoseconds.
        """
        work_us = float(
            np.cumsum((times.fwd_us + times.bwd_us).max(axis=1, initial=0.0))[-1:].sum()
        )
        work_us += 2.0 * float(times.latency_us.sum())
        if not work_us * 1000.0 < _MOST_NS:
            longest = int(times.lengths.max(initial=0))
            raise ValueError(
                f"{len(times.lengths)} samples, the longest of {longest} tokens, are "
                f"too much work to plan: {work_us / 8.64e10:.0f} days, of 52 at most"
            )
        # At least one: a sample that weighs nothing would be piled up with others like it.
        fwd_ns = np.maximum(np.rint(times.fwd_us * 1000.0).astype(np.int64), 1)
        bwd_ns = np.maximum(np.rint(times.bwd_us * 1000.0).astype(np.int64), 1)
        expert_ns = np.zeros((len(times.lengths), 2), dtype=np.int64)
        if times.expert_us is not None:
            expert_ns = np.rint(times.expert_us * 1000.0).astype(np.int64)
        # The tighter bound saves time only where experts are shared, and the second search with it.
        is_shared = bool(times.shares_experts.any())
        bound_us = (lower_bound_us if is_shared else work_bound_us)(times, token_budget)
        return cls(
            tree=times.tree,
            lengths=times.lengths,
            fwd_ns=fwd_ns,
            bwd_ns=bwd_ns,
            total_ns=fwd_ns + bwd_ns,
            latency_ns=np.rint(times.latency_us * 1000.0).astype(np.int64),
            token_budget=token_budget,
            bound_us=bound_us,
            expert_ns=expert_ns,
            shares_experts=times.shares_experts,
            expert_degree=times.expert_degree,
        )

    @property
    def bound_ns(self) -> int:
        """The lower bound in whole nanoseconds."""
        return round(self.bound_us * 1000.0)

    @property
    def num_samples(self) -> int:
        """Samples of the micro-batch."""
        return len(self.lengths)

    @property
    def degrees(self) -> IntArray:
        """`[K+1]` the chain of degrees, ascending."""
        return np.array(self.tree.degrees, dtype=np.int64)

    @cached_property
    def least_work_column(self) -> IntArray:
        """`[n]` the degree of least work of each sample, of those at which it fits the budget."""
        work_ns = np.where(self.fits_alone(), self.total_ns * self.degrees, _NEVER)
        column: IntArray = work_ns.argmin(axis=1)
        return column

    @cached_property
    def own_ns(self) -> tuple[IntArray, IntArray]:
        """`[n, K+1]` forward and backward time without the experts where groups share them."""
        shared = np.where(self.shares_experts, 1.0 / self.degrees, 0.0)
        expert_ns = [
            np.rint(self.expert_ns[:, which, None] * shared).astype(np.int64) for which in range(2)
        ]
        return self.fwd_ns - expert_ns[0], self.bwd_ns - expert_ns[1]

    def fits_alone(self) -> BoolArray:
        """`[n, K+1]` bool: whether a sample fits the token budget at a degree by itself."""
        if self.token_budget is None:
            return np.ones((self.num_samples, len(self.tree.degrees)), dtype=bool)
        return self.lengths[:, None] <= self.token_budget * self.degrees


def cheapest_columns(problem: MicroBatchProblem, cap_ns: int) -> IntArray:
    """`[n]` the degree of least work among those that take a sample at most `cap_ns`.

    A sample that takes longer at every degree gets its fastest one. Degrees at which a sample
    breaks the token budget by itself are left out.
    """
    column = problem.least_work_column.copy()
    # The cap matters only to samples that it keeps from the degree of least work of all.
    rows = np.flatnonzero(problem.total_ns[np.arange(len(column)), column] > cap_ns)
    total_ns = np.where(problem.fits_alone()[rows], problem.total_ns[rows], _NEVER)
    cap = np.maximum(cap_ns, total_ns.min(axis=1))[:, None]
    work_ns = np.where(total_ns <= cap, problem.total_ns[rows] * problem.degrees, _NEVER)
    column[rows] = work_ns.argmin(axis=1)
    return column
