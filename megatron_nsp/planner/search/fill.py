"""Filling the leaves with the short tail of a micro-batch.

A step lasts max over ranks forward + max over ranks backward. Attention takes 2.5 times as long
backward, dense work twice (three times where it is recomputed), an all-to-all once: ranks that hold
different mixtures can be busy equally long and still wait for one another in both passes. So the
tail is filled in two parts:

1. its longest samples, whose attention counts most, even out the excess B - k F of backward over
   forward. The shortest sample is nearly all dense work, as is the bulk of what is still to come:
   k is its B / F, so that dense work has no excess;
2. the rest fills all ranks up to one level, in forward and backward at once.

For part 2, let r be the forward share of the rest. With the forward limit r M + x and the backward
limit (1 - r) M - x, a rank has room for M - e of the rest, e = max((F - x) / r, (B + x) / (1 - r)).
The rest fits if the rooms add up to it and none is negative, so for a given x the least M is

    level = max(max e, (sum e + rest) / P)

and the best x is found by trying some. LPT then reaches the level within a short sample's time.
"""

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.placement import MicroBatchState, exact_sums

_FIRST_PARTS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Shares of the tail's time tried for part 1."""

_TILT_STEPS = np.linspace(-1.0, 1.0, 17)
_TILT_ROUNDS = 3
"""Each round tries 17 values of x around the best one so far, eight times closer than before."""

_ROOM_ROUNDS = 6
"""Times a level is raised to make up for ranks without token room; more change little."""


def fill_level(
    fwd_ns: IntArray,
    bwd_ns: IntArray,
    rest_fwd_ns: int,
    rest_bwd_ns: int,
    room_ns: IntArray | None = None,
) -> tuple[int, IntArray]:
    """The least level M that takes the rest, and the offset e of each rank at that level.

    Args:
        fwd_ns: `[P]` forward load of each rank.
        bwd_ns: `[P]` backward load of each rank.
        rest_fwd_ns: forward time of all samples still to be placed.
        rest_bwd_ns: their backward time.
        room_ns: `[P]` how much of the rest the token budget lets each rank take; None = any.
    """
    rest_ns, num_ranks = rest_fwd_ns + rest_bwd_ns, len(fwd_ns)
    if rest_ns == 0:
        return int(fwd_ns.max()) + int(bwd_ns.max()), fwd_ns
    share = rest_fwd_ns / rest_ns
    spread = 0.25 * (int((fwd_ns + bwd_ns).max()) + rest_ns / num_ranks)
    center, level, offsets = 0.0, 0, fwd_ns
    for _ in range(_TILT_ROUNDS):
        tilts = np.rint(center + spread * _TILT_STEPS).astype(np.int64)[:, None]
        tried = np.maximum((fwd_ns - tilts) / share, (bwd_ns + tilts) / (1 - share))
        tried_ns = np.rint(tried).astype(np.int64)
        levels = np.maximum(tried_ns.max(axis=1), -(-(tried_ns.sum(axis=1) + rest_ns) // num_ranks))
        if room_ns is not None:
            levels = _raised_levels(levels, tried_ns, rest_ns, room_ns)
        best = int(levels.argmin())
        center, level, offsets = float(tilts[best, 0]), int(levels[best]), tried_ns[best]
        spread *= float(_TILT_STEPS[-1] - _TILT_STEPS[-2])
    return level, offsets


def _raised_levels(
    levels: IntArray, offsets: IntArray, rest_ns: int, room_ns: IntArray
) -> IntArray:
    """The levels `[t]` raised until ranks without room for their part are made up for by others."""
    for _ in range(_ROOM_ROUNDS):
        wanted_ns = levels[:, None] - offsets
        missing_ns = rest_ns - np.minimum(wanted_ns, room_ns).sum(axis=1)
        num_open = np.maximum((wanted_ns < room_ns).sum(axis=1), 1)
        levels = levels + np.maximum(-(-missing_ns // num_open), 0)
    return levels


def _room_ns(
    state: MicroBatchState, tokens: IntArray, rest_ns: int, rest_tokens: int
) -> IntArray | None:
    """`[P]` time of the rest that each rank has token room for; None without a token budget."""
    budget = state.problem.token_budget
    if budget is None:
        return None
    ns_per_token = rest_ns / max(rest_tokens, 1)
    return np.rint((budget - tokens) * ns_per_token).astype(np.int64)


def predicted_ns(state: MicroBatchState, tail: IntArray) -> int:
    """The load that a fill with the samples of `tail` could reach if they were sand."""
    problem = state.problem
    latency_ns = np.where(state.stream_tokens[0] > 0, 0, problem.latency_ns[0])
    rest_fwd_ns = int(problem.fwd_ns[tail, 0].sum())
    rest_bwd_ns = int(problem.bwd_ns[tail, 0].sum())
    room_ns = _room_ns(
        state,
        state.rank_tokens(),
        rest_fwd_ns + rest_bwd_ns,
        int(problem.lengths[tail].sum()),
    )
    level_ns, _ = fill_level(
        state.fwd_ns + latency_ns, state.bwd_ns + latency_ns, rest_fwd_ns, rest_bwd_ns, room_ns
    )
    return level_ns


def fill_leaves(state: MicroBatchState, tail: IntArray) -> IntArray:
    """Places the tail at the leaves.

    Args:
        state: the micro-batch with its longer samples placed; changed in place.
        tail: samples, longest first.

    Returns:
        The samples for which no leaf has room under the token budget.
    """
    if len(tail) == 0:
        return tail
    problem = state.problem
    fwd_ns, bwd_ns = problem.fwd_ns[tail, 0], problem.bwd_ns[tail, 0]
    done_ns = np.cumsum(fwd_ns + bwd_ns)
    stops = [int(np.searchsorted(done_ns, share * done_ns[-1])) for share in _FIRST_PARTS]
    trial, tokens = state.copy(), state.rank_tokens()
    first, dense_ratio = tail[: stops[-1]], bwd_ns[-1] / fwd_ns[-1]
    trial.place_level(
        0,
        first,
        _excess_ns(state.fwd_ns, state.bwd_ns, dense_ratio),
        _excess_ns(fwd_ns, bwd_ns, dense_ratio)[: stops[-1]],
    )
    best_level_ns, best_stop, best_start_ns = -1, 0, state.fwd_ns
    latency_ns = np.where(state.stream_tokens[0] > 0, 0, problem.latency_ns[0])
    for stop in dict.fromkeys(stops):
        rest_fwd_ns, rest_bwd_ns = int(fwd_ns[stop:].sum()), int(bwd_ns[stop:].sum())
        held = tokens + _leaf_sums(trial, first[:stop], problem.lengths[first[:stop]])
        rest_tokens = int(problem.lengths[tail[stop:]].sum())
        level_ns, start_ns = fill_level(
            state.fwd_ns + latency_ns + _leaf_sums(trial, first[:stop], fwd_ns[:stop]),
            state.bwd_ns + latency_ns + _leaf_sums(trial, first[:stop], bwd_ns[:stop]),
            rest_fwd_ns,
            rest_bwd_ns,
            _room_ns(state, held, rest_fwd_ns + rest_bwd_ns, rest_tokens),
        )
        if best_level_ns < 0 or level_ns < best_level_ns:
            best_level_ns, best_stop, best_start_ns = level_ns, stop, start_ns
    first = first[:best_stop]
    has_node = trial.index[first] >= 0
    state.add(0, first[has_node], trial.index[first[has_node]])
    rest = np.concatenate([first[~has_node], tail[best_stop:]])
    return state.place_level(0, rest, best_start_ns, problem.total_ns[rest, 0])


def _excess_ns(fwd_ns: IntArray, bwd_ns: IntArray, dense_ratio: float) -> IntArray:
    """Backward time beyond what dense work of the same forward time would take."""
    excess_ns: IntArray = bwd_ns - np.rint(dense_ratio * fwd_ns).astype(np.int64)
    return excess_ns


def _leaf_sums(trial: MicroBatchState, samples: IntArray, values_ns: IntArray) -> IntArray:
    """`[P]` sums of the values over the leaves where `trial` put the samples."""
    leaf = trial.index[samples]
    has_node = leaf >= 0
    return exact_sums(leaf[has_node], values_ns[has_node], len(trial.fwd_ns))
