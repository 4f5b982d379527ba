"""What the cost model says about a whole plan: the time of every rank, pass and micro-batch.

A rank spends the sum over the active nodes on its path; a pass lasts as long as its slowest rank; a
step is the sum over its micro-batches of the forward and the backward pass and a bias each:

    load = sum over micro-batches of (max over ranks fwd + max over ranks bwd + bias)

Sums run node by node in one fixed order, so that every rank of a job gets the same bits.
"""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan.arrays import BoolArray, FloatArray, IntArray
from megatron_nsp.plan.plan import CARRIED
from megatron_nsp.plan.tree import SPTree


@dataclass(frozen=True, eq=False)
class PlanScore:
    """Times of one plan, in microseconds, M micro-batches on P ranks.

    Attributes:
        fwd_us: `[M, P]` work of the forward pass, node latency left out.
        bwd_us: `[M, P]` work of the backward pass, node latency left out.
        latency_us: `[M, P]` latency of the rank's active nodes in one pass; the same in both.
        bias_us: time of a micro-batch beyond its work; filler ones pay it too.
    """

    fwd_us: FloatArray
    bwd_us: FloatArray
    latency_us: FloatArray
    bias_us: float

    @property
    def load_us(self) -> float:
        """Time of the step: what the planner minimises."""
        fwd_us = (self.fwd_us + self.latency_us).max(axis=1)
        return self._step_us(fwd_us, (self.bwd_us + self.latency_us).max(axis=1))

    @property
    def load_no_latency_us(self) -> float:
        """Time of the step if an active node cost nothing beyond its work."""
        return self._step_us(self.fwd_us.max(axis=1), self.bwd_us.max(axis=1))

    @property
    def rank_load_us(self) -> FloatArray:
        """`[P]` time each rank is busy in the step, both passes of all micro-batches."""
        busy_us = self.fwd_us + self.bwd_us + 2.0 * self.latency_us
        total_us: FloatArray = np.cumsum(busy_us, axis=0)[-1]
        return total_us

    def _step_us(self, fwd_us: FloatArray, bwd_us: FloatArray) -> float:
        return float(np.cumsum(fwd_us + bwd_us + self.bias_us)[-1])


@dataclass(frozen=True, eq=False)
class NodeTimes:
    """What nodes cost each of their ranks, `[nodes]` by micro-batch, degree and index.

    Attributes:
        fwd_us: in a forward pass.
        bwd_us: in a backward pass.
        latency_us: latency in one pass.
    """

    fwd_us: FloatArray
    bwd_us: FloatArray
    latency_us: FloatArray


def node_numbers(
    tree: SPTree,
    column: IntArray,
    index: IntArray,
    micro_batch: IntArray,
    num_micro_batches: int,
) -> tuple[IntArray, int]:
    """Numbers of nodes by micro-batch, degree and index; and how many there are."""
    nodes_of = tree.num_ranks // np.array(tree.degrees)
    first = np.cumsum(nodes_of) - nodes_of
    num_nodes = int(nodes_of.sum())
    return micro_batch * num_nodes + first[column] + index, num_micro_batches * num_nodes


@dataclass(frozen=True, eq=False)
class SampleTimes:
    """The cost model worked out for one batch of n samples and a chain of K + 1 degrees.

    Attributes:
        tree: the SP tree; column k of every array below is the degree `tree.degrees[k]`.
        lengths: `[n]` tokens.
        fwd_us: `[n, K+1]` what each sample adds to every rank of its node in a forward pass.
        bwd_us: `[n, K+1]` the same in a backward pass.
        latency_us: `[K+1]` what an active node adds to each of its ranks in one pass.
        bias_us: time of a micro-batch beyond its work.
        expert_us: `[n, 2]` work of each sample's experts in both passes, on one rank; `fwd_us` and
            `bwd_us` hold it divided by the degree.
        expert_degree: ranks of an expert-parallel group, which do that work together.
    """

    tree: SPTree
    lengths: IntArray
    fwd_us: FloatArray
    bwd_us: FloatArray
    latency_us: FloatArray
    bias_us: float
    expert_us: FloatArray | None = None
    expert_degree: int = 1

    @property
    def shares_experts(self) -> BoolArray:
        """`[K+1]` whether nodes of a degree lie inside a group that does more than their work.

        Nodes that groups cut unevenly are taken to do their own experts' work.
        """
        degrees = np.array(self.tree.degrees)
        if self.expert_us is None or self.tree.num_ranks % self.expert_degree:
            return np.zeros(len(degrees), dtype=bool)
        shares: BoolArray = (degrees < self.expert_degree) & (self.expert_degree % degrees == 0)
        return shares

    def take(self, samples: IntArray) -> "SampleTimes":
        """The times of some of the samples, in the order given."""
        return SampleTimes(
            tree=self.tree,
            lengths=self.lengths[samples],
            fwd_us=self.fwd_us[samples],
            bwd_us=self.bwd_us[samples],
            latency_us=self.latency_us,
            bias_us=self.bias_us,
            expert_us=None if self.expert_us is None else self.expert_us[samples],
            expert_degree=self.expert_degree,
        )

    def at_degrees(self, columns: tuple[int, ...]) -> "SampleTimes":
        """The times at some of the degrees."""
        kept = list(columns)
        return SampleTimes(
            tree=SPTree(self.tree.num_ranks, tuple(self.tree.degrees[k] for k in columns)),
            lengths=self.lengths,
            fwd_us=self.fwd_us[:, kept],
            bwd_us=self.bwd_us[:, kept],
            latency_us=self.latency_us[kept],
            bias_us=self.bias_us,
            expert_us=self.expert_us,
            expert_degree=self.expert_degree,
        )

    def score(
        self,
        column: IntArray,
        index: IntArray,
        micro_batch: IntArray,
        num_micro_batches: int,
        more: NodeTimes | None = None,
    ) -> PlanScore:
        """Scores one assignment of the samples.

        Args:
            column: `[n]` column of each sample's degree.
            index: `[n]` index of its node among those of the degree.
            micro_batch: `[n]` its micro-batch; `CARRIED` samples cost nothing.
            num_micro_batches: micro-batches of the step, M.
            more: what the nodes cost beside their samples.
        """
        nodes_of = self.tree.num_ranks // np.array(self.tree.degrees)
        placed = np.flatnonzero(micro_batch != CARRIED)
        column = column[placed]
        node, size = node_numbers(
            self.tree, column, index[placed], micro_batch[placed], num_micro_batches
        )
        node_latency_us = np.tile(np.repeat(self.latency_us, nodes_of), num_micro_batches)
        node_us = [
            np.bincount(node, weights=self.fwd_us[placed, column], minlength=size),
            np.bincount(node, weights=self.bwd_us[placed, column], minlength=size),
            np.where(np.bincount(node, minlength=size) > 0, node_latency_us, 0.0),
        ]
        if more is not None:
            added = more.fwd_us, more.bwd_us, more.latency_us
            node_us = [one + other for one, other in zip(node_us, added, strict=True)]
        fwd_us, bwd_us, latency_us = (
            self._rank_sums(each_us.reshape(num_micro_batches, -1)) for each_us in node_us
        )
        if self.expert_us is not None and self.shares_experts.any():
            rows = placed[self.shares_experts[column]]
            where = column[self.shares_experts[column]], index[rows], micro_batch[rows]
            fwd_us += self._shift(self.expert_us[rows, 0], *where, num_micro_batches)
            bwd_us += self._shift(self.expert_us[rows, 1], *where, num_micro_batches)
        return PlanScore(fwd_us, bwd_us, latency_us, self.bias_us)

    def _shift(
        self,
        expert_us: FloatArray,
        column: IntArray,
        index: IntArray,
        micro_batch: IntArray,
        num_micro_batches: int,
    ) -> FloatArray:
        """`[M, P]` what sharing experts adds to each rank: its part of the group's less its own."""
        num_ranks, group = self.tree.num_ranks, self.expert_degree
        shift_us = np.zeros((num_micro_batches, num_ranks))
        for k, degree in enumerate(self.tree.degrees):
            at = column == k
            num_nodes = num_ranks // degree
            own_us = _sums(micro_batch[at], index[at], expert_us[at], num_micro_batches, num_nodes)
            shift_us -= np.repeat(own_us / degree, degree, axis=1)
        number = index * np.array(self.tree.degrees)[column] // group
        size = num_micro_batches, num_ranks // group
        shift_us += np.repeat(_sums(micro_batch, number, expert_us, *size) / group, group, axis=1)
        return shift_us

    def _rank_sums(self, node_us: FloatArray) -> FloatArray:
        """`[M, P]` sums over each rank's path of `[M, nodes]`, nodes by degree and index."""
        load_us = np.zeros((len(node_us), self.tree.num_ranks))
        start = 0
        for degree in self.tree.degrees:
            stop = start + self.tree.num_ranks // degree
            load_us += np.repeat(node_us[:, start:stop], degree, axis=1)
            start = stop
        return load_us


def _sums(
    row: IntArray, place: IntArray, values: FloatArray, num_rows: int, num_places: int
) -> FloatArray:
    """`[rows, places]` sums of the values."""
    flat = np.bincount(row * num_places + place, weights=values, minlength=num_rows * num_places)
    sums: FloatArray = flat.reshape(num_rows, num_places)
    return sums
