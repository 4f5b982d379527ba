"""A beam search over the longest samples, for batches that packing alone leaves unbalanced.

Longest first, every kept state is extended by placing the next sample on the two least loaded nodes
of every degree. States are ranked by what they can still become:

    key = max(max forward + max backward, (time of all ranks + least work of the rest) / P)

The second part is what the paper's own key (the first part alone) lacks: without it the beam
spreads early samples over large degrees, since that looks good until the work it cost must be paid
for. Everything is limited by counts, never by time, so that every rank finds the same states.
"""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.placement import MicroBatchState
from megatron_nsp.planner.search.problem import MicroBatchProblem, cheapest_columns

_WIDTH = 16
"""States kept after each sample."""

_NUM_NODES = 2
"""Nodes of a degree tried by each state."""


@dataclass(frozen=True, eq=False)
class _States:
    """w partial placements of the same samples.

    Attributes:
        fwd_ns: `[w, P]` forward load of each rank.
        bwd_ns: `[w, P]` backward load.
        is_active: per column `[w, P // d]` whether a node holds samples.
        tokens: `[w, P]` tokens of each rank, every sample's share rounded up.
        column: `[w, m]` columns of the m samples placed.
        index: `[w, m]` nodes of the m samples placed.
    """

    fwd_ns: IntArray
    bwd_ns: IntArray
    is_active: list[np.ndarray]
    tokens: IntArray
    column: IntArray
    index: IntArray


def beam(problem: MicroBatchProblem, num_prefix: int, limit_ns: int) -> list[MicroBatchState]:
    """Placements of the first samples, the most promising first.

    Args:
        problem: the micro-batch.
        num_prefix: how many of its samples to place.
        limit_ns: load to beat; the rest is assumed to take its cheapest degrees below it.

    Returns:
        At most 16 states; none if the token budget leaves no room for some sample.
    """
    num_ranks, degrees = problem.tree.num_ranks, problem.tree.degrees
    column = cheapest_columns(problem, limit_ns)
    work_ns = problem.total_ns[np.arange(problem.num_samples), column] * problem.degrees[column]
    rest_ns = int(work_ns.sum())
    states = _States(
        fwd_ns=np.zeros((1, num_ranks), dtype=np.int64),
        bwd_ns=np.zeros((1, num_ranks), dtype=np.int64),
        is_active=[np.zeros((1, num_ranks // degree), dtype=bool) for degree in degrees],
        tokens=np.zeros((1, num_ranks), dtype=np.int64),
        column=np.zeros((1, 0), dtype=np.int64),
        index=np.zeros((1, 0), dtype=np.int64),
    )
    for sample in range(num_prefix):
        rest_ns -= int(work_ns[sample])
        parents, columns, nodes, keys = _children(problem, states, sample, rest_ns)
        if len(parents) == 0:
            return []
        best = _distinct(keys)[:_WIDTH]
        states = _extend(problem, states, sample, parents[best], columns[best], nodes[best])
    return [_as_state(problem, states, row, num_prefix) for row in range(len(states.fwd_ns))]


def _children(
    problem: MicroBatchProblem, states: _States, sample: int, rest_ns: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """All extensions by one sample: parent, column, node, and `[c, 3]` the key and tie-breakers."""
    width, num_ranks = states.fwd_ns.shape
    max_fwd_ns, max_bwd_ns = states.fwd_ns.max(axis=1), states.bwd_ns.max(axis=1)
    busy_ns = (states.fwd_ns + states.bwd_ns).sum(axis=1)
    found: list[tuple[IntArray, ...]] = []
    for k, degree in enumerate(problem.tree.degrees):
        need = -(-int(problem.lengths[sample]) // degree)
        shape = (width, num_ranks // degree, degree)
        opened_ns = np.where(states.is_active[k], 0, problem.latency_ns[k])
        fwd_ns = states.fwd_ns.reshape(shape).max(axis=2) + opened_ns + problem.fwd_ns[sample, k]
        bwd_ns = states.bwd_ns.reshape(shape).max(axis=2) + opened_ns + problem.bwd_ns[sample, k]
        order = fwd_ns + bwd_ns
        if problem.token_budget is not None:
            is_full = states.tokens.reshape(shape).max(axis=2) + need > problem.token_budget
            order = np.where(is_full, np.iinfo(np.int64).max, order)
        parents = np.arange(width)
        for _ in range(min(_NUM_NODES, num_ranks // degree)):
            node = order.argmin(axis=1)
            fits = order[parents, node] < np.iinfo(np.int64).max
            fwd = np.maximum(max_fwd_ns, fwd_ns[parents, node])
            bwd = np.maximum(max_bwd_ns, bwd_ns[parents, node])
            added = (problem.total_ns[sample, k] + 2 * opened_ns[parents, node]) * degree
            level = -(-(busy_ns + added + rest_ns) // num_ranks)
            rows = (
                parents,
                np.full(width, k),
                node,
                np.maximum(fwd + bwd, level),
                fwd + bwd,
                added,
            )
            found.append(tuple(row[fits] for row in rows))
            # the next node must look different: the same load elsewhere leads to the same future
            order = np.where(order == order[parents, node][:, None], np.iinfo(np.int64).max, order)
    parent, column, node, *keys = (np.concatenate(rows) for rows in zip(*found, strict=True))
    return parent, column, node, np.stack(keys, axis=1)


def _distinct(keys: IntArray) -> IntArray:
    """Rows by ascending key, of equal rows the first only."""
    order = np.lexsort(keys.T[::-1])
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = np.any(np.diff(keys[order], axis=0) != 0, axis=1)
    chosen: IntArray = order[is_new]
    return chosen


def _extend(
    problem: MicroBatchProblem,
    states: _States,
    sample: int,
    parents: IntArray,
    columns: IntArray,
    nodes: IntArray,
) -> _States:
    """The chosen children as states."""
    degree = problem.degrees[columns]
    ranks = np.arange(problem.tree.num_ranks)
    holds = ranks[None, :] // degree[:, None] == nodes[:, None]
    is_active = [flags[parents] for flags in states.is_active]
    latency_ns = np.zeros(len(parents), dtype=np.int64)
    for k, flags in enumerate(is_active):
        rows = np.flatnonzero(columns == k)
        latency_ns[rows] = np.where(flags[rows, nodes[rows]], 0, problem.latency_ns[k])
        flags[rows, nodes[rows]] = True
    fwd_ns = problem.fwd_ns[sample, columns] + latency_ns
    bwd_ns = problem.bwd_ns[sample, columns] + latency_ns
    need = -(-int(problem.lengths[sample]) // degree)
    return _States(
        fwd_ns=states.fwd_ns[parents] + holds * fwd_ns[:, None],
        bwd_ns=states.bwd_ns[parents] + holds * bwd_ns[:, None],
        is_active=is_active,
        tokens=states.tokens[parents] + holds * need[:, None],
        column=np.column_stack([states.column[parents], columns]),
        index=np.column_stack([states.index[parents], nodes]),
    )


def _as_state(
    problem: MicroBatchProblem, states: _States, row: int, num_prefix: int
) -> MicroBatchState:
    """One state of the beam, booked as that of a micro-batch."""
    return MicroBatchState.booked(problem, states.column[row], states.index[row])
