"""Evening out: many small exchanges that bring the busiest ranks down one after the other.

`moves.improve` asks that a change lowers the load of the whole micro-batch, which no single change
does once several ranks are equally busy. Here a change must only bring the busiest rank down
without bringing another one up to where it was: the load falls once the last such rank is down.

A rank's excess is how far it is over the slowest pass; ranks wait for one another in each pass:

    excess = max(forward - slowest forward, backward - slowest backward)

A change is worth the largest excess of the ranks that it touches; the least is made, if below zero.
"""

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.moves import loads_after_moves
from megatron_nsp.planner.search.placement import MicroBatchState, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem

FEW_A_RANK = 10
"""Samples a rank up to which a placement is evened out; of more, LPT leaves little to gain."""

_ROUNDS_PER_RANK = 4
_NUM_OWN, _NUM_PARTNERS, _NUM_OTHER = 16, 12, 512
"""Samples of the busy rank tried, leaves they may go to, samples of those tried."""

_NUM_DIVIDED, _NUM_DIVISIONS = 12, 4
"""Samples of two leaves divided anew, all 2^12 ways, and leaves that it is tried with."""

_NUM_TRIED = 8
"""Best changes tried if the token budget forbids some."""

_LEAST_PAUSE, _LEAST_GAIN = 16, 1e-3
"""Rounds, half as many as ranks but at least so many, in which the load must fall by this share."""

_CLOSE = 5e-5
"""A load so close to the mean of all ranks is left alone."""

_NEVER = np.iinfo(np.int64).max


def evened(problem: MicroBatchProblem, placement: Placement) -> Placement:
    """The placement evened out, if there are few samples a rank."""
    if problem.num_samples > FEW_A_RANK * problem.tree.num_ranks:
        return placement
    state = MicroBatchState.booked(problem, placement.column, placement.index)
    even_out(state)
    return state.placement()


def even_out(state: MicroBatchState) -> None:
    """Exchanges samples while it helps, at most a fixed number of times; changes the state.

    Each round takes the rank that sets the slowest forward or backward and tries, until something
    helps, to swap a sample of its leaf with one of another leaf or to hand one over; to divide some
    samples of both leaves anew, in every possible way; to move a sample to any other node.
    """
    pause, checked_ns = max(len(state.fwd_ns) // 2, _LEAST_PAUSE), state.load_ns()
    for number in range(1, _ROUNDS_PER_RANK * len(state.fwd_ns) + 1):
        mean_ns = float(state.fwd_ns.mean()) + float(state.bwd_ns.mean())
        if state.load_ns() <= (1 + _CLOSE) * mean_ns:
            return
        if number % pause == 0:
            if checked_ns - state.load_ns() < _LEAST_GAIN * checked_ns:
                return
            checked_ns = state.load_ns()
        busiest = dict.fromkeys((int(state.fwd_ns.argmax()), int(state.bwd_ns.argmax())))
        if not any(
            _swap(state, rank) or _divide_anew(state, rank) or _move(state, rank)
            for rank in busiest
        ):
            return


def _excess(state: MicroBatchState, fwd_ns: IntArray, bwd_ns: IntArray) -> IntArray:
    """How far loads are over the slowest passes as they are now."""
    return np.maximum(fwd_ns - int(state.fwd_ns.max()), bwd_ns - int(state.bwd_ns.max()))


def _swap(state: MicroBatchState, rank: int) -> bool:
    """Swaps a sample of the rank's leaf with one of a less busy leaf, or hands it over."""
    problem = state.problem
    at_leaf = (state.column == 0) & (state.index >= 0)
    own = _spread(np.flatnonzero(at_leaf & (state.index == rank)), _NUM_OWN)
    if len(own) == 0:
        return False
    calm = np.argsort(_excess(state, state.fwd_ns, state.bwd_ns), kind="stable")[:_NUM_PARTNERS]
    calm = calm[(calm != rank) & (state.stream_tokens[0][calm] > 0)]
    others = _spread(np.flatnonzero(at_leaf & np.isin(state.index, calm)), _NUM_OTHER)
    # One row a sample of the rank, one place a partner: with leaves 4 and 7 calm, holding samples
    # a b and c, the places are  a b c | nothing of 4, nothing of 7  on leaves  4 4 7 | 4 7.
    partner = np.concatenate([state.index[others], calm])
    fwd_ns = np.concatenate([problem.fwd_ns[others, 0], np.zeros_like(calm)])
    bwd_ns = np.concatenate([problem.bwd_ns[others, 0], np.zeros_like(calm)])
    length = np.concatenate([problem.lengths[others], np.zeros_like(calm)])
    fwd_given = problem.fwd_ns[own, 0][:, None] - fwd_ns
    bwd_given = problem.bwd_ns[own, 0][:, None] - bwd_ns
    excess = np.maximum(
        _excess(state, state.fwd_ns[rank] - fwd_given, state.bwd_ns[rank] - bwd_given),
        _excess(state, state.fwd_ns[partner] + fwd_given, state.bwd_ns[partner] + bwd_given),
    )
    if problem.token_budget is not None:
        tokens, given = state.rank_tokens(), problem.lengths[own][:, None] - length
        fits = tokens[partner] + given <= problem.token_budget
        fits &= tokens[rank] - given <= problem.token_budget
        excess = np.where(fits, excess, _NEVER)
    if excess.size == 0 or excess.min() >= 0:
        return False
    row, place = np.unravel_index(int(excess.argmin()), excess.shape)
    sample, leaf = own[row : row + 1], partner[place : place + 1]
    state.add(0, sample, np.array([rank]), sign=-1)
    if place < len(others):
        returned = others[place : place + 1]
        state.add(0, returned, leaf, sign=-1)
        state.add(0, returned, np.array([rank]))
    state.add(0, sample, leaf)
    return True


def _divide_anew(state: MicroBatchState, rank: int) -> bool:
    """Divides samples of the rank's leaf and of a less busy one in the best way of all."""
    problem = state.problem
    calm = np.argsort(_excess(state, state.fwd_ns, state.bwd_ns), kind="stable")
    calm = calm[(calm != rank) & (state.stream_tokens[0][calm] > 0)][:_NUM_DIVISIONS]
    at_leaf = (state.column == 0) & (state.index >= 0)
    for partner in calm.tolist():
        own, theirs = (
            _spread(np.flatnonzero(at_leaf & (state.index == leaf)), _NUM_DIVIDED // 2)
            for leaf in (rank, partner)
        )
        if len(own) == 0 or len(theirs) == 0:
            continue
        samples = np.concatenate([own, theirs])
        is_own = np.arange(len(samples)) < len(own)
        # Row i is i in binary, lowest bit first, and says which samples the rank gets: of three
        # 000 100 010 110 001 ... Sums of whole numbers below 2^53 are exact.
        ways = (np.arange(2 ** len(samples))[:, None] >> np.arange(len(samples)) & 1).astype(float)
        gained = [
            (ways @ values[samples] - values[own].sum()).astype(np.int64)
            for values in (problem.fwd_ns[:, 0], problem.bwd_ns[:, 0], problem.lengths)
        ]
        fwd, bwd, tokens = gained
        excess = np.maximum(
            _excess(state, state.fwd_ns[rank] + fwd, state.bwd_ns[rank] + bwd),
            _excess(state, state.fwd_ns[partner] - fwd, state.bwd_ns[partner] - bwd),
        )
        # The first row gives all to the partner, the last to the rank. No leaf may be left empty:
        # its latency would go.
        excess[[0, -1]] = _NEVER
        if problem.token_budget is not None:
            held = state.rank_tokens()
            fits = held[rank] + tokens <= problem.token_budget
            fits &= held[partner] - tokens <= problem.token_budget
            excess = np.where(fits, excess, _NEVER)
        best = int(excess.argmin())
        if excess[best] < 0:
            is_gained = ways[best] > 0
            for leaf, moves in ((rank, is_gained & ~is_own), (partner, ~is_gained & is_own)):
                here, other = samples[moves], partner if leaf == rank else rank
                state.add(0, here, np.full(len(here), other), sign=-1)
                state.add(0, here, np.full(len(here), leaf))
            return True
    return False


def _move(state: MicroBatchState, rank: int) -> bool:
    """Moves a sample of any node on the rank's path to any other node."""
    problem = state.problem
    on_path = (state.index == rank // problem.degrees[state.column]) & (state.index >= 0)
    samples = _spread(np.flatnonzero(on_path), _NUM_OWN)
    if len(samples) == 0:
        return False
    after = loads_after_moves(state, samples)
    left = _excess(state, after.left_fwd_ns[:, rank], after.left_bwd_ns[:, rank])[:, None]
    excess = np.maximum(_excess(state, after.fwd_ns, after.bwd_ns), left)
    return after.carry_out_least(state, excess, 0, _NUM_TRIED)


def _spread(samples: IntArray, most: int) -> IntArray:
    """At most so many of the samples, spread over all their lengths."""
    if len(samples) <= most:
        return samples
    return samples[np.arange(most) * len(samples) // most]  # 3 of 7: places 0 2 4
