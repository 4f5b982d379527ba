"""The active nodes of one micro-batch, laid out for the simulator: one row a place on the path.

All ranks of a node share its ancestors, so the i-th active node on a rank's path is the i-th on the
path of every member. Row i of the arrays below holds, for each rank, the times of the i-th active
node on its path; ranks of one node are neighbours, so a node is a run of equal entries.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_nsp.plan import IntArray, Plan
from megatron_nsp.planner.cost import CostModel
from megatron_nsp.planner.score import FloatArray
from megatron_nsp.planner.split_cost import SplitCost
from megatron_nsp.schedule import Pass, Phase, Step, build_schedule
from megatron_nsp.split import Split
from megatron_nsp.tree import Node

BoolArray = npt.NDArray[np.bool_]

_FIRST, _LATER = range(2)
"""Rounds with times of their own: all after the first are alike."""


@dataclass(frozen=True, eq=False)
class ActivePaths:
    """A micro-batch on P ranks whose longest active path has N nodes.

    Attributes:
        is_active: `[N, P]` whether the rank's path has an i-th active node.
        starts: N arrays, the first rank of each node of row i; ranks without one stand alone.
        degree: `[N, P]` degree of the node.
        node: `[N, P]` number of the node, depth by depth; -1 where there is none.
        ring_degree: `[N, P]` ring members of the node.
        splits: P lists, how the active nodes on each rank's path are split.
        phase_us: per pass, phase and first or later round `[N, P]` time of one layer, latency
            included.
        tokens: `[P]` tokens of each rank.
    """

    is_active: BoolArray
    starts: tuple[IntArray, ...]
    degree: IntArray
    node: IntArray
    ring_degree: IntArray
    splits: tuple[tuple[Split, ...], ...]
    phase_us: dict[tuple[Pass, Phase, int], FloatArray]
    tokens: IntArray
    _orders: dict[tuple[Pass, bool], list[tuple[Step, BoolArray]]] = field(default_factory=dict)

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

    def step_us(self, step: Step) -> FloatArray:
        """`[P]` time of a step on each rank, if its node has it; the step's depth is the row."""
        later = _LATER if step.round else _FIRST
        step_us: FloatArray = self.phase_us[step.pass_, step.phase, later][step.node.depth]
        return step_us

    def communicates(self, step: Step) -> BoolArray:
        """`[P]` whether a step of an exchange puts something on the network."""
        row = step.node.depth
        is_inside = step.phase is Phase.EPILOGUE or step.round == 0
        is_among_members = step.phase is Phase.NATIVE or not is_inside
        members = self.ring_degree[row]
        sends: BoolArray = (members if is_among_members else self.degree[row] // members) > 1
        return sends

    def order(self, pass_: Pass, overlap: bool) -> list[tuple[Step, BoolArray]]:
        """The steps of all ranks in an order that respects that of each rank's own schedule.

        Positions on the path stand for nodes. Ranks whose nodes are split differently have
        different schedules; a step that communicates comes when all ranks of its node are there.

        Returns:
            Steps, and `[P]` which ranks run them then.
        """
        if (pass_, overlap) not in self._orders:
            self._orders[pass_, overlap] = list(self._merged(pass_, overlap))
        return self._orders[pass_, overlap]

    def _merged(self, pass_: Pass, overlap: bool) -> list[tuple[Step, BoolArray]]:
        schedules: dict[tuple[Split, ...], tuple[Step, ...]] = {}
        for splits in dict.fromkeys(self.splits):
            path = [Node(row, 0) for row in range(len(splits))]
            split_of = dict(zip(path, splits, strict=True))
            schedules[splits] = build_schedule(path, pass_, overlap, split_of)
        steps = list(dict.fromkeys(step for schedule in schedules.values() for step in schedule))
        number = {step: place for place, step in enumerate(steps)}
        longest = max(map(len, schedules.values()), default=0)
        own = np.full((len(self.splits), longest + 1), len(steps))  # the end: no step
        for rank, splits in enumerate(self.splits):
            schedule = schedules[splits]
            own[rank, : len(schedule)] = [number[step] for step in schedule]
        at = np.zeros(len(own), dtype=np.int64)
        merged: list[tuple[Step, BoolArray]] = []
        while (current := own[np.arange(len(own)), at]).min(initial=len(steps)) < len(steps):
            before = len(merged)
            for place in np.unique(current[current < len(steps)]).tolist():
                step, is_on = steps[place], current == place
                if step.phase is not Phase.COMPUTE:
                    waits = self.communicates(step) & ~is_on & self.is_active[step.node.depth]
                    is_on = is_on & (self.sync(step.node.depth, waits.astype(np.float64)) == 0)
                if is_on.any():
                    merged.append((step, is_on))
                    at[is_on] += 1
            assert len(merged) > before, "the schedules lock each other up"
        return merged


def active_paths(plan: Plan, micro_batch: int, cost: CostModel) -> ActivePaths:
    """Lays out one micro-batch of a plan, with the times the cost model predicts for one layer."""
    tree, num_ranks = plan.tree, plan.tree.num_ranks
    paths = [plan.active_path(rank, micro_batch) for rank in range(num_ranks)]
    num_rows = max(map(len, paths), default=0)
    number = {node: place for place, node in enumerate(tree.nodes())}
    node = np.full((num_rows, num_ranks), -1, dtype=np.int64)
    degree = np.ones((num_rows, num_ranks), dtype=np.int64)
    ring_degree = np.ones((num_rows, num_ranks), dtype=np.int64)
    for rank, path in enumerate(paths):
        for row, entry in enumerate(path):
            node[row, rank], degree[row, rank] = number[entry], tree.degree(entry)
            ring_degree[row, rank] = plan.split_of(entry, micro_batch).ring_degree
    node_us = _node_us(plan, micro_batch, cost, number)
    return ActivePaths(
        is_active=node >= 0,
        starts=tuple(_run_starts(row) for row in node),
        degree=degree,
        node=node,
        ring_degree=ring_degree,
        splits=tuple(tuple(plan.split_of(entry, micro_batch) for entry in path) for path in paths),
        phase_us={key: each_us[node] * (node >= 0) for key, each_us in node_us.items()},
        tokens=plan.token_load(micro_batch),
    )


def _run_starts(row: IntArray) -> IntArray:
    """Where runs of equal nodes begin; a rank without a node is a run by itself."""
    is_start = np.ones(len(row), dtype=bool)
    is_start[1:] = (row[1:] != row[:-1]) | (row[1:] < 0)
    return np.flatnonzero(is_start)


def _node_us(
    plan: Plan, micro_batch: int, cost: CostModel, number: dict[Node, int]
) -> dict[tuple[Pass, Phase, int], FloatArray]:
    """`[nodes]` time of each phase in one layer, latency included; 0 for what sends nothing."""
    layers, alike = cost.shape.num_layers, defaultdict(list)
    for node in plan.active_nodes(micro_batch):
        alike[plan.tree.degree(node), plan.split_of(node, micro_batch)].append(node)
    keys = [(pass_, phase, later) for pass_ in Pass for phase in Phase for later in range(2)]
    times = {key: np.zeros(len(number)) for key in keys}
    for (degree, split), nodes in alike.items():
        how, samples = (
            cost.of(degree, split),
            [plan.samples_of(node, micro_batch) for node in nodes],
        )
        lengths = plan.lengths[np.concatenate(samples)]
        of_node = np.repeat(np.arange(len(nodes)), [len(each) for each in samples])
        tokens = np.bincount(of_node, weights=lengths)
        where = [number[node] for node in nodes]
        for pass_, phase, later in keys:
            each_us = how.round_us(lengths, pass_) * how.has_call(later)
            round_us = np.bincount(of_node, weights=each_us)
            if split.is_native:
                work_us = _native_us(how, pass_, phase, round_us, tokens) * (later == 0)
                times[pass_, phase, later][where] = work_us / layers
                continue
            if phase is Phase.COMPUTE:
                work_us = round_us
            else:
                work_us = tokens * how.exchange_us_per_token(pass_, phase, later)
            latency_us = how.phase_latency_us(phase, later)
            times[pass_, phase, later][where] = work_us / layers + latency_us
    return times


def _native_us(
    how: SplitCost, pass_: Pass, phase: Phase, round_us: FloatArray, tokens: FloatArray
) -> FloatArray:
    """`[n]` time of native nodes in all layers; what of it is not compute is exposed."""
    if phase is Phase.NATIVE:
        return how.attention_us(pass_, round_us, tokens) + how.latency_us
    if phase is Phase.COMPUTE:
        launch_us = how.shape.num_layers * how.profile.latency_us
        return how.num_calls * (round_us + launch_us)
    return np.zeros_like(round_us)
