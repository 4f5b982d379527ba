"""Packing the longest samples under a limit on every rank's load.

The core of the search. Longest first, a sample tries its degrees by increasing
work (degree times time); at a degree it goes to the least loaded node, if that stays below the
limit M, and otherwise tries the next degree. The least M for which all samples find a node is
found by doubling steps, then halving them. What makes this strong: a sample moves up to a larger
degree only when the smaller nodes are full, not by a rule on its length.

`load[k][i]` below is the load of the fullest rank of node i of column k, with the nodes above and
below it counted, so a node's room is known without looking at its ranks:

    placing c on node 1 of column 1      column 0    .  .  +c  +c     all nodes below get c
                                         column 1     .   [+c]
                                         column 2       max           those above take the maximum
"""

from collections.abc import Sequence

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.placement import MicroBatchState
from megatron_nsp.planner.search.problem import MicroBatchProblem

Places = list[tuple[int, int]]
"""Column and node of each sample of the prefix."""

_STEP = 1 / 512
_MAX_STEPS = 4096
"""Limits tried: floor * (1 + step / 512) for steps up to 4096, nine times the floor."""


class PrefixPacker:
    """The longest samples of a micro-batch, ready to be packed under any limit.

    Args:
        problem: the micro-batch.
        cost_ns: `[m, K+1]` what each of the m longest samples adds to the load of every rank of its
            node; these samples are packed, the rest goes to the leaves later.
    """

    def __init__(self, problem: MicroBatchProblem, cost_ns: IntArray) -> None:
        self.problem = problem
        self._tries = np.argsort(cost_ns * problem.degrees, axis=1, kind="stable").tolist()
        self._costs = cost_ns.tolist()
        self._latencies = (2 * problem.latency_ns).tolist()
        tokens = -(-problem.lengths[: len(cost_ns), None] // problem.degrees)
        self._tokens = tokens.tolist()

    def pack(self, limit_ns: int) -> Places | None:
        """Packs the prefix with no rank above the limit; None if a sample finds no node.

        Tokens are counted with every sample's share rounded up, which is never too few.
        """
        degrees, budget = self.problem.tree.degrees, self.problem.token_budget
        load = [[0] * (self.problem.tree.num_ranks // degree) for degree in degrees]
        tokens = [row.copy() for row in load]
        is_active = [[False] * len(row) for row in load]
        places: Places = []
        for costs, need, tries in zip(self._costs, self._tokens, self._tries, strict=True):
            for k in tries:
                row, cost = load[k], costs[k]
                least = min(row)
                if least + cost > limit_ns:
                    continue
                node = row.index(least)
                if budget is not None and tokens[k][node] + need[k] > budget:
                    node = _node_with_room(row, tokens[k], budget - need[k])
                    if node < 0:
                        continue
                if not is_active[k][node]:
                    cost += self._latencies[k]
                if row[node] + cost <= limit_ns:
                    break
            else:
                return None
            is_active[k][node] = True
            places.append((k, node))
            _raise(load, degrees, k, node, cost)
            if budget is not None:
                _raise(tokens, degrees, k, node, need[k])
        return places

    def pack_tightest(self, floor_ns: int) -> Places | None:
        """The packing under the least limit that has one.

        Args:
            floor_ns: no limit below this is worth a try.

        Returns:
            The packing; None if the prefix cannot be packed at all.
        """

        def limit(step: int) -> int:
            return floor_ns + int(floor_ns * step * _STEP)

        step, failed = 0, -1
        places = self.pack(limit(step))
        while places is None:
            if step == _MAX_STEPS:
                return None
            step, failed = max(1, 2 * step), step
            places = self.pack(limit(step))
        while step - failed > 1:
            middle = (step + failed) // 2
            tried = self.pack(limit(middle))
            if tried is None:
                failed = middle
            else:
                step, places = middle, tried
        return places

    def state(self, places: Places) -> MicroBatchState:
        """A micro-batch with the packing booked."""
        column, node = np.array(places, dtype=np.int64).reshape(-1, 2).T
        return MicroBatchState.booked(self.problem, column, node)


def _node_with_room(row: Sequence[int], tokens: Sequence[int], room: int) -> int:
    """The least loaded node that holds at most `room` tokens; -1 if there is none."""
    nodes = [node for node, held in enumerate(tokens) if held <= room]
    return min(nodes, key=row.__getitem__, default=-1)


def _raise(rows: list[list[int]], degrees: tuple[int, ...], k: int, node: int, by: int) -> None:
    """Adds to every rank of a node, in the maxima of all nodes that share ranks with it."""
    for below in range(k + 1):
        ratio = degrees[k] // degrees[below]
        row = rows[below]
        for i in range(node * ratio, (node + 1) * ratio):
            row[i] += by
    top = rows[k][node]
    for above in range(k + 1, len(rows)):
        i = node * degrees[k] // degrees[above]
        if rows[above][i] >= top:
            break
        rows[above][i] = top
