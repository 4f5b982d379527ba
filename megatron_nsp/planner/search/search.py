"""The search of one micro-batch.

1. Drafts: the longest samples are packed under the least limit (prefix.py), by their time in the
   slower pass, and where budgets or experts make it harder also by that in both. Besides, all
   samples take the cheapest degree under a cap on their time and are placed level by level:
   simpler, but it counts tokens exactly.
2. What a perfect tail would make of a draft is known before it is filled (fill.py), so only the
   most promising drafts are. Whatever the token budget keeps out of the leaves goes elsewhere.
3. A fixed number of improving moves (moves.py).
4. If the result is far above the bound, a beam over the longest samples (beam.py) makes more
   drafts.

What comes out is then evened out (even_out.py), once the micro-batches of a step are settled.
"""

from collections.abc import Iterator

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.beam import beam
from megatron_nsp.planner.search.fill import fill_leaves, predicted_ns
from megatron_nsp.planner.search.moves import improve
from megatron_nsp.planner.search.placement import MicroBatchState, Placement
from megatron_nsp.planner.search.prefix import PrefixPacker
from megatron_nsp.planner.search.problem import MicroBatchProblem, cheapest_columns

LONG_SHARE = 0.2
"""Samples that take more than this share of the bound at a leaf belong to the prefix."""

MIN_PREFIX, MAX_PREFIX = 24, 160
"""Least and most samples of the prefix."""

CAPS = (1.0,)
BUDGET_CAPS = (1.0, 0.5, 0.3, 0.15)
"""Caps on a sample's time, as shares of the bound; low ones spread tokens, for tight budgets."""

NUM_FINISHED, LEAST_PROMISE = 2, 0.001
"""Drafts that are filled, and the gain that a further one must promise in a batch of many."""

BEAM_PREFIX = 24
"""Longest samples that the beam places."""

BEAM_ABOVE = 1.02
"""Load, as a multiple of the bound, from which the beam is tried."""

SMALL_BATCH, BEAM_ABOVE_SMALL = 64, 1.002
"""The same for at most so many samples, where the beam is cheap and packing leaves more to win."""

Finished = tuple[int, int, Placement]
"""Samples left over, load in nanoseconds, placement: less is better."""


def search(problem: MicroBatchProblem, packed_ns: IntArray | None = None) -> Placement:
    """The best placement found.

    Args:
        problem: the micro-batch.
        packed_ns: `[n, K+1]` what the longest samples are packed by, in the one draft there is
            then; without it several drafts are made.
    """
    best = _finish(list(_drafts(problem, packed_ns)), None)
    is_small = problem.num_samples <= SMALL_BATCH
    good_ns = (BEAM_ABOVE_SMALL if is_small else BEAM_ABOVE) * problem.bound_ns
    if best[0] or best[1] > good_ns:
        num_prefix = min(problem.num_samples, BEAM_PREFIX)
        tail = np.arange(num_prefix, problem.num_samples)
        states = beam(problem, num_prefix, max(best[1], problem.bound_ns))
        best = _finish([(state, tail) for state in states], best)
    return best[2]


def _finish(drafts: list[tuple[MicroBatchState, IntArray]], best: Finished | None) -> Finished:
    """Fills and improves the most promising drafts; the best of them and of `best`."""
    predicted = [predicted_ns(state, tail) for state, tail in drafts]
    for number in sorted(range(len(drafts)), key=predicted.__getitem__)[:NUM_FINISHED]:
        state, tail = drafts[number]
        least_gain = LEAST_PROMISE if state.problem.num_samples > SMALL_BATCH else 0.0
        if best is not None and best[0] == 0 and predicted[number] >= best[1] * (1 - least_gain):
            break
        num_left = len(state.place_anywhere(fill_leaves(state, tail)))
        improve(state)
        if best is None or (num_left, state.load_ns()) < best[:2]:
            best = (num_left, state.load_ns(), state.placement())
    assert best is not None, "there is always a draft by levels"
    return best


def _drafts(
    problem: MicroBatchProblem, packed_ns: IntArray | None
) -> Iterator[tuple[MicroBatchState, IntArray]]:
    """States with the long samples placed, and the samples still to be placed."""
    num_long = int((problem.total_ns[:, 0] > LONG_SHARE * problem.bound_ns).sum())
    num_prefix = min(max(num_long, MIN_PREFIX), MAX_PREFIX, problem.num_samples)
    tail = np.arange(num_prefix, problem.num_samples)
    least_ns = (problem.total_ns[:num_prefix] + 2 * problem.latency_ns).min(axis=1)
    floor_ns = max(problem.bound_ns, int(least_ns.max(initial=0)))
    is_simple = problem.token_budget is None and not problem.shares_experts.any()
    costs = [_slower_pass_ns(problem) if packed_ns is None else packed_ns]
    if packed_ns is None and not is_simple:
        costs.append(problem.total_ns)
    num_packed = 0
    for cost_ns in costs:
        packer = PrefixPacker(problem, cost_ns[:num_prefix])
        places = packer.pack_tightest(floor_ns)
        if places is not None:
            num_packed += 1
            yield packer.state(places), tail
    if packed_ns is not None and num_packed:
        return
    for cap in CAPS if is_simple else BUDGET_CAPS:
        yield _level_by_level(
            problem, cheapest_columns(problem, int(cap * problem.bound_ns)), num_prefix
        )


def _slower_pass_ns(problem: MicroBatchProblem) -> IntArray:
    """`[n, K+1]` times that say more than their sum about a rank's slower pass.

    With r the forward share of all work, a sample counts max(fwd / r, bwd / (1 - r)): one whose
    mixture of work is not the common one counts more, since other ranks will wait for its rank.
    """
    column = cheapest_columns(problem, problem.bound_ns)
    rows = np.arange(problem.num_samples)
    fwd_ns = int((problem.fwd_ns[rows, column] * problem.degrees[column]).sum())
    bwd_ns = int((problem.bwd_ns[rows, column] * problem.degrees[column]).sum())
    if fwd_ns == 0 or bwd_ns == 0:
        return problem.total_ns
    share = fwd_ns / (fwd_ns + bwd_ns)
    slower = np.maximum(problem.fwd_ns / share, problem.bwd_ns / (1 - share))
    return np.rint(slower).astype(np.int64)


def _level_by_level(
    problem: MicroBatchProblem, column: IntArray, num_prefix: int
) -> tuple[MicroBatchState, IntArray]:
    """The prefix and all samples above the leaves at their column, largest degree first."""
    state, left = MicroBatchState(problem), [np.flatnonzero(column[num_prefix:] == 0) + num_prefix]
    for k in range(len(problem.tree.degrees) - 1, 0, -1):
        left.append(state.place_level(k, np.flatnonzero(column == k)))
    left.append(state.place_level(0, np.flatnonzero(column[:num_prefix] == 0)))
    return state, np.sort(np.concatenate(left))
