"""The active nodes of one micro-batch, laid out for the simulator: one row a place in the order.

Ranks run their active nodes in the order of their tree, row by row; a rank with fewer of them than
others has none in the first or the last rows. Members of a node have it in the same row, and are
neighbours, so a node is a run of equal entries of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_nsp.order import ROOT_FIRST, Order, whole_order
from megatron_nsp.plan import IntArray, Plan
from megatron_nsp.planner.cost import CostModel
from megatron_nsp.planner.score import FloatArray
from megatron_nsp.schedule import Pass, Phase

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ActivePaths:
    """A micro-batch on P ranks, in N rows.

    Attributes:
        is_active: `[N, P]` whether the rank has a node in row i.
        starts: N arrays, the first rank of each node of row i; ranks without one stand alone.
        degree: `[N, P]` degree of the node.
        node: `[N, P]` number of the node, depth by depth; -1 where there is none.
        phase_us: per pass and phase `[N, P]` time of one layer, latency included.
        tokens: `[P]` tokens of each rank.
    """

    is_active: BoolArray
    starts: tuple[IntArray, ...]
    degree: IntArray
    node: IntArray
    phase_us: dict[tuple[Pass, Phase], FloatArray]
    tokens: IntArray

    @property
    def num_rows(self) -> int:
        """Rows (N): nodes of the longest active path, more where shorter ones reach beyond it."""
        return len(self.is_active)

    def sync(self, row: int, times_us: FloatArray) -> FloatArray:
        """`[P]` for each rank the latest time of the ranks of its node in a row."""
        starts = self.starts[row]
        sizes = np.diff(starts, append=len(times_us))
        latest: FloatArray = np.repeat(np.maximum.reduceat(times_us, starts), sizes)
        return latest


def active_paths(
    plan: Plan, micro_batch: int, cost: CostModel, orders: Sequence[Order] = ()
) -> ActivePaths:
    """Lays out one micro-batch of a plan, with the times the cost model predicts for one layer.

    Args:
        plan: the plan.
        micro_batch: which of its passes.
        cost: the cost model.
        orders: in which order each tree runs its nodes; root first if there are none. C times as
            many lay out C copies of all ranks, side by side.
    """
    tree = plan.tree
    orders = orders or [ROOT_FIRST] * (tree.num_ranks // tree.max_degree)
    samples = np.flatnonzero(plan.micro_batch == micro_batch)
    num_at = [tree.num_nodes(depth) for depth in range(tree.num_depths)]
    first, num_nodes = np.cumsum([0, *num_at]), sum(num_at)
    node_of = first[plan.depth[samples]] + plan.index[samples]
    is_active = np.bincount(node_of, minlength=num_nodes) > 0
    listed = np.array([whole_order(order, tree.num_depths) for order in orders]).T
    depth = np.repeat(listed, tree.max_degree, axis=1)
    copy, rank = np.divmod(np.arange(depth.shape[1]), tree.num_ranks)
    degree_at = np.array(tree.degrees[::-1])
    number = first[depth] + rank // degree_at[depth]
    place, column = np.nonzero(is_active[number])
    row = _rows(is_active[number], depth)[place, column]
    shape = int(row.max(initial=-1)) + 1, len(rank)
    node = np.full(shape, -1, dtype=np.int64)
    degree = np.ones(shape, dtype=np.int64)
    node[row, column] = number[place, column]
    degree[row, column] = degree_at[depth[place, column]]
    return ActivePaths(
        is_active=node >= 0,
        starts=tuple(_run_starts(np.where(line < 0, -1, line + num_nodes * copy)) for line in node),
        degree=degree,
        node=node,
        phase_us={
            (pass_, phase): _node_us(plan, samples, node_of, cost, pass_, phase, num_nodes)[node]
            * (node >= 0)
            for pass_ in Pass
            for phase in Phase
        },
        tokens=np.tile(plan.token_load(micro_batch), len(rank) // tree.num_ranks),
    )


def _rows(is_listed: BoolArray, depth: IntArray) -> IntArray:
    """Row of each entry of the ranks' lists, so that members of a node have it in the same one.

    Whoever shares a node shares all shallower ones too, in one unbroken run (`order.safe_orders`),
    so counting from the shallowest active node gives members the same number.

    Args:
        is_listed: `[depths, P]` whether an entry is an active node.
        depth: `[depths, P]` its depth.
    """
    place = np.cumsum(is_listed, axis=0)
    shallowest = np.where(is_listed, depth, len(depth)).argmin(axis=0)
    row: IntArray = place - np.take_along_axis(place, shallowest[None], axis=0)
    return row - row[is_listed].min(initial=0)


def _run_starts(row: IntArray) -> IntArray:
    """Where runs of equal nodes begin; a rank without a node is a run by itself."""
    is_start = np.ones(len(row), dtype=bool)
    is_start[1:] = (row[1:] != row[:-1]) | (row[1:] < 0)
    return np.flatnonzero(is_start)


def _node_us(
    plan: Plan,
    samples: IntArray,
    node_of: IntArray,
    cost: CostModel,
    pass_: Pass,
    phase: Phase,
    num_nodes: int,
) -> FloatArray:
    """`[nodes]` time of one phase in one layer, latency included; 0 for exchanges at degree 1."""
    lengths, layers = plan.lengths[samples], cost.shape.num_layers
    column = plan.tree.num_depths - 1 - plan.depth[samples]
    if phase is Phase.COMPUTE:
        each_us = cost.compute_us(lengths, pass_)[np.arange(len(lengths)), column]
    else:
        each_us = cost.exchange_us_per_token(pass_, phase)[column] * lengths
    total_us = np.bincount(node_of, weights=each_us / layers, minlength=num_nodes)
    each_latency_us = [cost.phase_latency_us(phase, degree) for degree in plan.tree.degrees[::-1]]
    num_at = [plan.tree.num_nodes(depth) for depth in range(plan.tree.num_depths)]
    node_us: FloatArray = total_us + np.repeat(np.array(each_latency_us), num_at)
    return node_us
