"""Improving moves: a finished placement, polished by a fixed number of single changes.

The load of a micro-batch is set by one rank in forward and one in backward. Each round looks at
samples on the paths of these two ranks, works out the load after moving each of them to every other
node, and carries out the best move if it helps.
"""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.placement import MicroBatchState

_NUM_ROUNDS = 12
_NUM_CANDIDATES = 12
_NUM_TARGETS_TRIED = 8
"""Rounds, samples looked at in a round, and best moves tried if the token budget forbids some."""

_LEAST_GAIN = 5e-4
"""A round that gains less than this share of the load is the last."""


def improve(state: MicroBatchState) -> None:
    """Moves samples while it helps, at most a fixed number of times; changes the state in place."""
    for _ in range(_NUM_ROUNDS):
        load_ns = state.load_ns()
        if not _best_move(state) or load_ns - state.load_ns() < _LEAST_GAIN * load_ns:
            return


def _candidates(state: MicroBatchState) -> IntArray:
    """Samples on the paths of the slowest ranks: the longest and the shortest of them."""
    degrees = state.problem.degrees[state.column]
    is_critical = np.zeros(len(degrees), dtype=bool)
    for rank in (int(state.fwd_ns.argmax()), int(state.bwd_ns.argmax())):
        is_critical |= state.index == rank // degrees
    samples = np.flatnonzero(is_critical & (state.index >= 0))
    if len(samples) <= _NUM_CANDIDATES:
        return samples
    half = _NUM_CANDIDATES // 2
    return np.concatenate([samples[:half], samples[-half:]])


def _best_move(state: MicroBatchState) -> bool:
    """Carries out the best move of one candidate to another node; False if none helps."""
    samples = _candidates(state)
    if len(samples) == 0:
        return False
    after = loads_after_moves(state, samples)
    load_ns = np.maximum(after.fwd_ns, after.left_fwd_ns.max(axis=1)[:, None])
    load_ns = load_ns + np.maximum(after.bwd_ns, after.left_bwd_ns.max(axis=1)[:, None])
    return after.carry_out_least(state, load_ns, state.load_ns(), _NUM_TARGETS_TRIED)


@dataclass(frozen=True, eq=False)
class Moves:
    """Every move of s samples to each of the tree's N nodes, leaves first.

    Attributes:
        samples: `[s]` the samples.
        targets: column and index of each node.
        left_fwd_ns: `[s, P]` forward load of each rank with the sample taken out.
        left_bwd_ns: `[s, P]` the same backward.
        fwd_ns: `[s, N]` forward load of the node's fullest rank after the move.
        bwd_ns: `[s, N]` the same backward.
    """

    samples: IntArray
    targets: list[tuple[int, int]]
    left_fwd_ns: IntArray
    left_bwd_ns: IntArray
    fwd_ns: IntArray
    bwd_ns: IntArray

    def carry_out_least(self, state: MicroBatchState, key: IntArray, below: int, most: int) -> bool:
        """Makes the move of least key below a limit; the next ones if the budget forbids it."""
        for flat in np.argsort(key, axis=None, kind="stable")[:most].tolist():
            row, target = divmod(flat, len(self.targets))
            if key[row, target] >= below:
                return False
            if state.move(int(self.samples[row]), *self.targets[target]):
                return True
        return False


def loads_after_moves(state: MicroBatchState, samples: IntArray) -> Moves:
    """The loads after moving each sample to each node."""
    problem, targets = state.problem, []
    left_fwd_ns, left_bwd_ns, opened = _loads_without(state, samples)
    fwd_ns: list[IntArray] = []
    bwd_ns: list[IntArray] = []
    for k, degree in enumerate(problem.tree.degrees):
        shape = (len(samples), -1, degree)  # ranks 0 1 2 3 4 5 at degree 2: (0 1) (2 3) (4 5)
        latency_ns = np.where(opened[k], 0, problem.latency_ns[k])
        for found, left, own in (
            (fwd_ns, left_fwd_ns, problem.fwd_ns),
            (bwd_ns, left_bwd_ns, problem.bwd_ns),
        ):
            found.append(left.reshape(shape).max(axis=2) + latency_ns + own[samples, k][:, None])
        targets += [(k, node) for node in range(problem.tree.num_ranks // degree)]
    loads = (np.concatenate(found, axis=1) for found in (fwd_ns, bwd_ns))
    return Moves(samples, targets, left_fwd_ns, left_bwd_ns, *loads)


def _loads_without(
    state: MicroBatchState, samples: IntArray
) -> tuple[IntArray, IntArray, list[np.ndarray]]:
    """Loads and active nodes with each of the samples taken out, one row a sample."""
    problem = state.problem
    column, index = state.column[samples], state.index[samples]
    ranks = np.arange(problem.tree.num_ranks)
    # Rank 5 lies in node 5 // 2 = 2 of degree 2, and in node 5 // 4 = 1 of degree 4.
    holds = ranks[None, :] // problem.degrees[column][:, None] == index[:, None]
    opened = [np.tile(tokens > 0, (len(samples), 1)) for tokens in state.stream_tokens]
    latency_ns = np.zeros(len(samples), dtype=np.int64)
    for row, (sample, k, node) in enumerate(
        zip(samples.tolist(), column.tolist(), index.tolist(), strict=True)
    ):
        if state.stream_tokens[k][node] == problem.lengths[sample]:
            opened[k][row, node] = False
            latency_ns[row] = problem.latency_ns[k]
    fwd_ns = problem.fwd_ns[samples, column] + latency_ns
    bwd_ns = problem.bwd_ns[samples, column] + latency_ns
    return (
        state.fwd_ns[None, :] - holds * fwd_ns[:, None],
        state.bwd_ns[None, :] - holds * bwd_ns[:, None],
        opened,
    )
