"""FlexSP's integer program: how many samples of each bucket go to which group of ranks.

G groups are on offer, of degree d(g) each; K buckets of n(k) samples, all counted with the length
and the time of the longest. Integers A[k, g] and binaries m[g] minimise M subject to

    sum over g of A[k, g] = n(k)                                      every sample has a group
    sum over k of time(k, d(g)) A[k, g] + latency(d(g)) m[g] <= M     M is the slowest group
    sum over k of tokens(k) A[k, g] <= d(g) capacity m[g]             a group holds its tokens
    m[g] <= sum over k of A[k, g] <= n m[g]                           m says whether it is used
    sum over g of d(g) m[g] <= P                                      groups are disjoint

Groups of one degree are alike, so the first of them are used: m[g] >= m[g + 1]. That changes no
optimum and saves most of the work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.policies.flexsp_buckets import bucket_starts
from megatron_nsp.planner.search.placement import MicroBatchState, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem

NUM_BUCKETS = 16

OPTIMAL_WITHIN = 1e-3
"""A solution this close to the solver's bound counts as optimal."""

Row = tuple[IntArray, npt.ArrayLike, float, float]
"""Columns, their factors, and the least and largest sum."""


@dataclass(frozen=True)
class SolverLimit:
    """When the solver stops and gives the best it has.

    Attributes:
        num_nodes: nodes of its tree; the same on every machine.
        seconds: wall time; None = no limit.
    """

    num_nodes: int
    seconds: float | None = None


def place_in_groups(problem: MicroBatchProblem, limit: SolverLimit) -> Placement | None:
    """Places one micro-batch in disjoint groups; None if the solver finds no way.

    Raises:
        ValueError: scipy, which brings the solver, is not installed.
    """
    starts = bucket_starts(problem.lengths, NUM_BUCKETS)
    counts = np.diff(np.append(starts, problem.num_samples))
    columns = offered_groups(problem)
    if len(columns) == 0:
        return None
    program = _Program(problem, starts, counts, columns)
    shares = program.solve(limit)
    if shares is None or (shares.sum(axis=1) != counts).any():
        return None
    is_used = shares.sum(axis=0) > 0
    if problem.degrees[columns[is_used]].sum() > problem.tree.num_ranks:
        return None
    return _placement(problem, shares[:, is_used], columns[is_used])


def offered_columns(num_degrees: int) -> range:
    """Columns of the degrees FlexSP may use: never 1, unless the tree has no other."""
    return range(min(1, num_degrees - 1), num_degrees)


def offered_groups(problem: MicroBatchProblem) -> IntArray:
    """`[G]` column of each group on offer, the largest degrees first.

    As many of each degree as the ranks hold. Let s be the largest degree that memory forces on a
    sample, and `count` the samples it is forced on: smaller degrees get (P - s count) / d groups.
    """
    degrees, num_ranks = problem.degrees, problem.tree.num_ranks
    least = problem.fits_alone().argmax(axis=1)
    largest = int(least.max())
    taken = int(degrees[largest]) * int((least == largest).sum())
    columns: list[int] = []
    for k in reversed(offered_columns(len(degrees))):
        free = max(num_ranks - taken, 0) if k < largest else num_ranks
        columns += [k] * (free // int(degrees[k]))
    return np.array(columns, dtype=np.int64)


class _Program:
    """The integer program of one micro-batch.

    Variables: A by bucket and group, `[K * G]`; then m, `[G]`; then M.
    """

    def __init__(
        self, problem: MicroBatchProblem, starts: IntArray, counts: IntArray, columns: IntArray
    ) -> None:
        self.problem, self.counts, self.columns = problem, counts, columns
        self.degrees = problem.degrees[columns]
        self.tokens = problem.lengths[starts]
        # Relative to the bound M is about 1: the solver's tolerances are absolute.
        unit_ns = max(problem.bound_ns, 1)
        self.time = problem.total_ns[starts][:, columns] / unit_ns
        self.latency = 2 * problem.latency_ns[columns] / unit_ns
        rounded_tokens = int((self.tokens * counts).sum())
        budget = problem.token_budget
        room = np.full(len(columns), rounded_tokens)
        self.room = room if budget is None else np.minimum(room, budget * self.degrees)

    def solve(self, limit: SolverLimit) -> IntArray | None:
        """`[K, G]` samples of each bucket in each group; None if the solver finds none."""
        optimize, sparse = solver_modules()
        num_buckets, num_groups = self.time.shape
        size = num_buckets * num_groups
        most = np.minimum(self.counts[:, None], self.room // self.tokens[:, None])
        upper = np.concatenate([most.reshape(-1), np.ones(num_groups), [np.inf]])
        columns, factors, least, largest = zip(*self._rows(), strict=True)
        row = np.repeat(np.arange(len(columns)), [len(one) for one in columns])
        matrix = sparse.csr_array(
            (np.concatenate(factors), (row, np.concatenate(columns))),
            shape=(len(columns), size + num_groups + 1),
        )
        goal = np.zeros(size + num_groups + 1)
        goal[-1] = 1.0
        options: dict[str, Any] = {"node_limit": limit.num_nodes, "mip_rel_gap": OPTIMAL_WITHIN}
        if limit.seconds is not None:
            options["time_limit"] = limit.seconds
        result = optimize.milp(
            goal,
            integrality=1.0 - goal,
            bounds=optimize.Bounds(0.0, upper),
            constraints=optimize.LinearConstraint(matrix, least, largest),
            options=options,
        )
        if result.x is None:
            return None
        shares: IntArray = np.rint(result.x[:size]).astype(np.int64)
        return shares.reshape(num_buckets, num_groups)

    def _rows(self) -> Iterator[Row]:
        num_buckets, num_groups = self.time.shape
        share = np.arange(num_buckets * num_groups).reshape(num_buckets, num_groups)
        is_used = share.size + np.arange(num_groups)
        slowest = share.size + num_groups
        ones = np.ones(num_buckets)
        for k in range(num_buckets):
            yield share[k], np.ones(num_groups), float(self.counts[k]), float(self.counts[k])
        for g in range(num_groups):
            of_group = np.append(share[:, g], is_used[g])
            room = float(self.room[g])
            yield of_group, np.append(self.tokens / room, -1.0), -np.inf, 0.0
            yield (
                np.append(of_group, slowest),
                np.concatenate([self.time[:, g], [self.latency[g], -1.0]]),
                -np.inf,
                0.0,
            )
            yield of_group, np.append(ones, -1.0), 0.0, np.inf
            yield of_group, np.append(ones, -float(self.counts.sum())), -np.inf, 0.0
            if g + 1 < num_groups and self.columns[g + 1] == self.columns[g]:
                yield is_used[g : g + 2], np.array([1.0, -1.0]), 0.0, np.inf
        yield is_used, self.degrees.astype(float), -np.inf, float(self.problem.tree.num_ranks)


def _placement(problem: MicroBatchProblem, shares: IntArray, columns: IntArray) -> Placement:
    """Groups side by side, the largest first: every one is an aligned block of ranks, a node.

    Of a bucket the longest samples go to the first groups.
    """
    degrees = problem.degrees[columns]
    nodes = (np.cumsum(degrees) - degrees) // degrees
    groups = np.tile(np.arange(len(columns)), len(shares))
    group_of = np.repeat(groups, shares.reshape(-1))
    state = MicroBatchState(problem)
    for k in np.unique(columns):
        samples = np.flatnonzero(columns[group_of] == k)
        state.add(int(k), samples, nodes[group_of[samples]])
    return state.placement()


def solver_modules() -> tuple[Any, Any]:
    """The two modules of scipy, which only this policy needs.

    Raises:
        ValueError: scipy is not installed.
    """
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise ValueError(
            "policy flexsp needs the package scipy: pip install 'megatron-nsp[milp]'"
        ) from error
    return optimize, sparse
