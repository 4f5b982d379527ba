"""The active nodes of one micro-batch, laid out for the simulator: one row a place on the path.

All ranks of a node share its ancestors, so the i-th active node on a rank's path is the i-th on the
path of every member. Row i of the arrays below holds, for each rank, the times of the i-th active
node on its path; ranks of one node are neighbours, so a node is a run of equal entries.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_nsp.plan import IntArray, Plan
from megatron_nsp.planner.cost import CostModel
from megatron_nsp.planner.score import FloatArray
from megatron_nsp.schedule import Pass, Phase

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ActivePaths:
    """A micro-batch on P ranks whose longest active path has N nodes.

    Attributes:
        is_active: `[N, P]` whether the rank's path has an i-th active node.
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
        """Nodes on the longest active path (N)."""
        return len(self.is_active)

    def sync(self, row: int, times_us: FloatArray) -> FloatArray:
        """`[P]` for each rank the latest time of the ranks of its node in a row."""
        starts = self.starts[row]
        sizes = np.diff(starts, append=len(times_us))
        latest: FloatArray = np.repeat(np.maximum.reduceat(times_us, starts), sizes)
        return latest


def active_paths(plan: Plan, micro_batch: int, cost: CostModel) -> ActivePaths:
    """Lays out one micro-batch of a plan, with the times the cost model predicts for one layer."""
    tree, num_ranks = plan.tree, plan.tree.num_ranks
    samples = np.flatnonzero(plan.micro_batch == micro_batch)
    paths = [plan.active_path(rank, micro_batch) for rank in range(num_ranks)]
    num_rows = max(map(len, paths), default=0)
    number = {node: place for place, node in enumerate(tree.nodes())}
    node = np.full((num_rows, num_ranks), -1, dtype=np.int64)
    degree = np.ones((num_rows, num_ranks), dtype=np.int64)
    for rank, path in enumerate(paths):
        for row, entry in enumerate(path):
            node[row, rank], degree[row, rank] = number[entry], tree.degree(entry)
    first = np.cumsum([0] + [tree.num_nodes(depth) for depth in range(tree.num_depths)])
    node_of = first[plan.depth[samples]] + plan.index[samples]
    return ActivePaths(
        is_active=node >= 0,
        starts=tuple(_run_starts(row) for row in node),
        degree=degree,
        node=node,
        phase_us={
            (pass_, phase): _node_us(plan, samples, node_of, cost, pass_, phase, len(number))[node]
            * (node >= 0)
            for pass_ in Pass
            for phase in Phase
        },
        tokens=plan.token_load(micro_batch),
    )


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
