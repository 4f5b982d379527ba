"""Placing the samples of one micro-batch on the nodes of a tree, level by level.

The one primitive is `MicroBatchState.place_level`: longest processing time first (LPT) over the
nodes of one degree, each sample to the node that it leaves least loaded.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.problem import MicroBatchProblem

UNPLACED = -1


def exact_sums(places: IntArray, values: IntArray, size: int) -> IntArray:
    """`[size]` sums of the values by place; exact while no sum passes 2^53 (104 days in ns)."""
    return np.bincount(places, weights=values, minlength=size).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the samples of a `MicroBatchProblem` go.

    Attributes:
        column: `[n]` column of each sample's degree.
        index: `[n]` index of its node among those of the degree; `UNPLACED` (-1) where none fits.
        load_ns: max over ranks forward plus max over ranks backward, node latency included.
    """

    column: IntArray
    index: IntArray
    load_ns: int

    @property
    def unplaced(self) -> IntArray:
        """Samples without a node."""
        return np.flatnonzero(self.index == UNPLACED)


class MicroBatchState:
    """A micro-batch being placed: loads of the ranks, tokens of the nodes.

    Attributes:
        column: `[n]` as in `Placement`.
        index: `[n]` as in `Placement`.
        fwd_ns: `[P]` time of each rank in the forward pass so far.
        bwd_ns: `[P]` the same in the backward pass.
        stream_tokens: per column `[P // d]` tokens of each node's stream; 0 where inactive.
    """

    def __init__(self, problem: MicroBatchProblem) -> None:
        self.problem = problem
        num_ranks = problem.tree.num_ranks
        self.column = np.zeros(problem.num_samples, dtype=np.int64)
        self.index = np.full(problem.num_samples, UNPLACED, dtype=np.int64)
        self.fwd_ns = np.zeros(num_ranks, dtype=np.int64)
        self.bwd_ns = np.zeros(num_ranks, dtype=np.int64)
        self.stream_tokens = [
            np.zeros(num_ranks // degree, dtype=np.int64) for degree in problem.tree.degrees
        ]

    @classmethod
    def booked(
        cls, problem: MicroBatchProblem, column: IntArray, index: IntArray
    ) -> "MicroBatchState":
        """A micro-batch with the first samples booked on nodes, `UNPLACED` ones left out."""
        state = cls(problem)
        for k in range(len(problem.tree.degrees)):
            samples = np.flatnonzero((column == k) & (index != UNPLACED))
            if len(samples):
                state.add(k, samples, index[samples])
        return state

    def copy(self) -> "MicroBatchState":
        """An independent copy."""
        twin = MicroBatchState.__new__(MicroBatchState)
        twin.problem = self.problem
        twin.column, twin.index = self.column.copy(), self.index.copy()
        twin.fwd_ns, twin.bwd_ns = self.fwd_ns.copy(), self.bwd_ns.copy()
        twin.stream_tokens = [tokens.copy() for tokens in self.stream_tokens]
        return twin

    def load_ns(self) -> int:
        """Slowest forward plus slowest backward of the samples placed so far."""
        return int(self.fwd_ns.max()) + int(self.bwd_ns.max())

    def placement(self) -> Placement:
        """The finished placement."""
        return Placement(self.column, self.index, self.load_ns())

    def rank_tokens(self, but_column: int | None = None) -> IntArray:
        """`[P]` tokens of each rank, exactly as `Plan.token_load` counts them.

        Args:
            but_column: leave the nodes of this column out.
        """
        tokens = np.zeros(self.problem.tree.num_ranks, dtype=np.int64)
        for k, degree in enumerate(self.problem.tree.degrees):
            if k != but_column and self.stream_tokens[k].any():
                # Slices of a stream of 10 over 4 ranks begin at 0 2 5 7 (10): 2 3 2 3 tokens.
                bounds = self.stream_tokens[k][:, None] * np.arange(degree + 1) // degree
                tokens += np.diff(bounds, axis=1).reshape(-1)
        return tokens

    def place_level(
        self,
        k: int,
        samples: IntArray,
        start_ns: IntArray | None = None,
        cost_ns: IntArray | None = None,
        allowed: range | None = None,
    ) -> IntArray:
        """Places samples on the nodes of one degree, each on the node it leaves least loaded.

        A node that is not active yet counts its latency.

        Args:
            k: column of the degree.
            samples: positions in the problem, in the order of placing (longest first).
            start_ns: `[P // d]` loads to balance instead of the ranks' time in both passes.
            cost_ns: what each sample adds to that load, instead of its time in both passes.
            allowed: the nodes to use, without it all of the degree.

        Returns:
            The samples for which no node of the degree has room under the token budget.
        """
        if len(samples) == 0:
            return samples
        problem, degree = self.problem, self.problem.tree.degrees[k]
        if start_ns is None:
            start_ns = (self.fwd_ns + self.bwd_ns).reshape(-1, degree).max(axis=1)
        if cost_ns is None:
            cost_ns = problem.total_ns[samples, k]
            start_ns = start_ns + np.where(self.stream_tokens[k] > 0, 0, 2 * problem.latency_ns[k])
        usable = range(len(start_ns)) if allowed is None else allowed
        nodes = self.choose_nodes(k, samples, start_ns, cost_ns, usable)
        has_node = nodes != UNPLACED
        self.add(k, samples[has_node], nodes[has_node])
        left: IntArray = samples[~has_node]
        return left

    def choose_nodes(
        self, k: int, samples: IntArray, start_ns: IntArray, cost_ns: IntArray, usable: range
    ) -> IntArray:
        """`[samples]` the nodes that `place_level` takes, `UNPLACED` where none has room.

        Books nothing; samples that share no usable node are chosen for alike before and after.
        """
        # One integer carries the load and, in its low bits, the node: ties go to the first node.
        # With 4 nodes the shift is 3: a load of 7 on node 2 is the key 7 << 3 | 2 = 58.
        shift = len(start_ns).bit_length()
        nodes = np.arange(usable.start, usable.stop)
        heap = ((start_ns[usable.start : usable.stop] << shift) | nodes).tolist()
        heapify(heap)
        costs = (cost_ns << shift).tolist()
        if self.problem.token_budget is not None:
            return np.array(self._nodes_with_room(k, samples, heap, costs, shift), dtype=np.int64)
        # `heapreplace` hands back the least key: the node that takes the sample.
        keys = [heapreplace(heap, heap[0] + cost) for cost in costs]
        taken: IntArray = np.array(keys, dtype=np.int64) & ((1 << shift) - 1)
        return taken

    def _nodes_with_room(
        self, k: int, samples: IntArray, heap: list[int], costs: list[int], shift: int
    ) -> list[int]:
        """LPT under the token budget: the least loaded node with room for each sample, or -1.

        A node without room is parked until a sample is short enough for it.
        """
        budget, degree = self.problem.token_budget, self.problem.tree.degrees[k]
        assert budget is not None
        ranks = self.rank_tokens(but_column=k).reshape(-1, degree)
        fullest = ranks.max(axis=1).tolist()
        streams = self.stream_tokens[k].tolist()
        lengths = self.problem.lengths[samples].tolist()
        mask, slots = (1 << shift) - 1, np.arange(degree + 1)
        parked: list[tuple[int, int]] = []
        nodes = []
        for length, cost in zip(lengths, costs, strict=True):
            while parked and -parked[0][0] >= length:
                heappush(heap, heappop(parked)[1])
            set_aside, chosen = [], UNPLACED
            while heap:
                key = heappop(heap)
                node = key & mask
                # The fullest rank gets stream / degree rounded down at best, and up at worst. With
                # room for 3 tokens at degree 4, streams of up to 15 can fit: 15 // 4 = 3.
                room = (budget - fullest[node] + 1) * degree - 1 - streams[node]
                if length > room:
                    heappush(parked, (-room, key))
                    continue
                stream = streams[node] + length
                fits = fullest[node] - (-stream // degree) <= budget
                if not fits:  # rounded up it is too much; it may be down where the rank is fullest
                    fits = int((ranks[node] + np.diff(stream * slots // degree)).max()) <= budget
                if fits:
                    heappush(heap, key + cost)
                    chosen, streams[node] = node, stream
                    break
                set_aside.append(key)
            for key in set_aside:
                heappush(heap, key)
            nodes.append(chosen)
        return nodes

    def add(self, k: int, samples: IntArray, nodes: IntArray, sign: int = 1) -> None:
        """Books samples on nodes of one column; with `sign` -1 takes them out again."""
        problem, degree = self.problem, self.problem.tree.degrees[k]
        num_nodes = len(self.stream_tokens[k])

        def node_sums(values: IntArray) -> IntArray:
            return sign * exact_sums(nodes, values, num_nodes)

        was_active = self.stream_tokens[k] > 0
        self.stream_tokens[k] = self.stream_tokens[k] + node_sums(problem.lengths[samples])
        opened = (self.stream_tokens[k] > 0).astype(np.int64) - was_active
        latency_ns = opened * problem.latency_ns[k]
        fwd_ns = node_sums(problem.fwd_ns[samples, k]) + latency_ns
        bwd_ns = node_sums(problem.bwd_ns[samples, k]) + latency_ns
        self.fwd_ns = self.fwd_ns + np.repeat(fwd_ns, degree)
        self.bwd_ns = self.bwd_ns + np.repeat(bwd_ns, degree)
        self.column[samples], self.index[samples] = k, nodes if sign > 0 else UNPLACED

    def move(self, sample: int, k: int, node: int) -> bool:
        """Moves a placed sample to another node; False, without any change, if it has no room."""
        budget = self.problem.token_budget
        before = self.fwd_ns, self.bwd_ns, list(self.stream_tokens)
        where = int(self.column[sample]), int(self.index[sample])
        one = np.array([sample])
        self.add(where[0], one, np.array([where[1]]), sign=-1)
        self.add(k, one, np.array([node]))
        if budget is None or int(self.rank_tokens().max()) <= budget:
            return True
        self.fwd_ns, self.bwd_ns, self.stream_tokens = before
        self.column[sample], self.index[sample] = where
        return False

    def place_anywhere(self, samples: IntArray) -> IntArray:
        """Places leftover samples wherever the token budget leaves room.

        Each tries the degrees from small to large, and the nodes of a degree by load.

        Returns:
            The samples that fit nowhere.
        """
        budget, left = self.problem.token_budget, []
        tokens = self.rank_tokens()
        for sample in samples.tolist():
            length = int(self.problem.lengths[sample])
            for k, degree in enumerate(self.problem.tree.degrees):
                # A rank gains its share rounded down, less one where the slices shift, or more.
                least = int(tokens.reshape(-1, degree).max(axis=1).min()) + length // degree - 1
                if budget is not None and least > budget:
                    continue
                if len(self.place_level(k, np.array([sample]))) == 0:
                    tokens = self.rank_tokens()
                    break
            else:
                left.append(sample)
        return np.array(left, dtype=np.int64)
