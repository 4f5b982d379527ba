"""Disjoint groups of different degrees: every rank belongs to one group for a micro-batch.

What dynamic sequence parallelism does without nesting (FlexSP, Megatron's hybrid context
parallel). For a time M every sample takes its cheapest degree that stays below M, and a degree
needs as many groups as its work fills in M. The least M on a ladder above the lower bound for
which all groups find ranks gives the partition; ranks left over enlarge the most loaded degrees.
Samples then go to the groups of their degree longest first, each to the least loaded (LPT).
"""

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.policies.static import place_static
from megatron_nsp.planner.search.placement import MicroBatchState, Placement, exact_sums
from megatron_nsp.planner.search.problem import MicroBatchProblem, cheapest_columns

RATIO, MAX_STEPS = 1.02, 256
"""Times M tried: the lower bound times 1.02^step; the last is over a hundred times the bound."""

NUM_FINISHED = 2
"""Partitions worked out, from the least M that has one."""


def place_disjoint_lpt(problem: MicroBatchProblem) -> Placement:
    """The best of a few partitions into disjoint groups."""
    step, failed = 1, -1
    while step < MAX_STEPS and _partition(problem, step) is None:
        step, failed = 2 * step, step
    while step - failed > 1:
        middle = (step + failed) // 2
        if _partition(problem, middle) is None:
            failed = middle
        else:
            step = middle
    best: tuple[int, int, Placement] | None = None
    for later in range(step, step + NUM_FINISHED):
        partition = _partition(problem, later)
        if partition is None:
            continue
        state, left = place_on_groups(problem, *partition)
        if best is None or (left, state.load_ns()) < best[:2]:
            best = (left, state.load_ns(), state.placement())
    # No partition: the token budget leaves some samples only degrees that use up all ranks.
    return place_static(problem, problem.tree.max_degree) if best is None else best[2]


def _partition(problem: MicroBatchProblem, step: int) -> tuple[IntArray, IntArray] | None:
    """Columns of the samples and groups of each column for one M; None if ranks do not suffice."""
    limit_ns = RATIO**step * max(problem.bound_ns, 1)
    degrees, column = problem.degrees, cheapest_columns(problem, int(limit_ns))
    time_ns = problem.total_ns[np.arange(problem.num_samples), column]
    degree_ns = exact_sums(column, time_ns, len(degrees))
    groups = np.ceil(degree_ns / limit_ns).astype(np.int64)
    if int((groups * degrees).sum()) > problem.tree.num_ranks:
        return None
    return column, grow(problem, groups, degree_ns)


def grow(problem: MicroBatchProblem, groups: IntArray, degree_ns: IntArray) -> IntArray:
    """Hands the ranks left over to the degrees whose groups have most to do.

    Args:
        problem: the micro-batch.
        groups: `[K+1]` groups of each degree; degrees without groups get none.
        degree_ns: `[K+1]` time of all samples at each degree.

    Returns:
        `[K+1]` groups of each degree.
    """
    degrees, groups = problem.degrees, groups.copy()
    spare = problem.tree.num_ranks - int((groups * degrees).sum())
    while True:
        can_grow = (degrees <= spare) & (groups > 0)
        if not can_grow.any():
            return groups
        mean_ns = np.where(can_grow, degree_ns / np.maximum(groups, 1), -1.0)
        k = int(mean_ns.argmax())
        groups[k] += 1
        spare -= int(degrees[k])


def place_on_groups(
    problem: MicroBatchProblem, column: IntArray, groups: IntArray
) -> tuple[MicroBatchState, int]:
    """The samples on the groups of their degree, and how many found no room.

    Large groups come first, so every group is an aligned block of ranks: a node.

    Args:
        problem: the micro-batch.
        column: `[n]` column of each sample's degree.
        groups: `[K+1]` groups of each degree.
    """
    state, first_rank, left = MicroBatchState(problem), 0, 0
    for k in range(len(groups) - 1, -1, -1):
        degree = problem.tree.degrees[k]
        nodes = range(first_rank // degree, first_rank // degree + int(groups[k]))
        left += len(state.place_level(k, np.flatnonzero(column == k), allowed=nodes))
        first_rank += int(groups[k]) * degree
    return state, left
