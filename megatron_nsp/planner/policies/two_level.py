"""Two levels: long samples at the largest degree, all others at the leaves.

The smallest nested plan, NSP-2L in the paper. Which samples are long follows from a cap on the
time a sample may take at a leaf. Several caps are tried on the longest samples, the most promising
ones on all of them, and the best plan is kept.
"""

import numpy as np

from megatron_nsp.planner.search.placement import MicroBatchState, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem

CAPS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
"""Caps on the time at a leaf, as shares of the lower bound."""

NUM_TRIED = 128
"""Longest samples that decide which caps are worth working out."""

NUM_FINISHED = 2


def place_two_level(problem: MicroBatchProblem) -> Placement:
    """The best split into samples at the roots and samples at the leaves."""
    total_ns, num_ranks = problem.total_ns, problem.tree.num_ranks
    must_split = ~problem.fits_alone()[:, 0]
    # Samples are sorted longest first: the long ones are the first so many.
    splits = {int(((total_ns[:, 0] > cap * problem.bound_ns) | must_split).sum()) for cap in CAPS}
    rest_ns = int(total_ns[:, 0].sum()) - np.cumsum(np.append(0, total_ns[:, 0]))
    drafts = []
    for num_long in sorted(splits):
        num_tried = min(max(NUM_TRIED, num_long), problem.num_samples)
        state, left = _place(problem, num_long, num_tried)
        load_ns = state.fwd_ns + state.bwd_ns
        sand_ns = (int(load_ns.sum()) + int(rest_ns[num_tried])) // num_ranks
        drafts.append((left, max(int(load_ns.max()), sand_ns), num_long))
    best: tuple[int, int, Placement] | None = None
    for _, _, num_long in sorted(drafts)[:NUM_FINISHED]:
        state, left = _place(problem, num_long, problem.num_samples)
        if best is None or (left, state.load_ns()) < best[:2]:
            best = (left, state.load_ns(), state.placement())
    assert best is not None
    return best[2]


def _place(
    problem: MicroBatchProblem, num_long: int, num_placed: int
) -> tuple[MicroBatchState, int]:
    """The first samples placed, `num_long` of them at the roots; and how many found no room."""
    state = MicroBatchState(problem)
    left = state.place_level(len(problem.tree.degrees) - 1, np.arange(num_long))
    more_left = state.place_level(0, np.arange(num_long, num_placed))
    return state, len(left) + len(more_left)
