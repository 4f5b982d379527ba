"""The active nodes of one micro-batch, laid out for the simulator: one row a place in the order.

Ranks run their active nodes in the order of their tree, row by row; a rank with fewer of them than
others has none in the first or the last rows. Members of a node have it in the same row, and are
neighbours, so a node is a run of equal entries of a row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.node_cost import SplitCost
from megatron_nsp.plan.arrays import BoolArray, FloatArray, IntArray
from megatron_nsp.plan.order import ROOT_FIRST, Order, whole_order
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.schedule import Step, build_schedule
from megatron_nsp.plan.split import ULYSSES, Split
from megatron_nsp.plan.tree import Node

_FIRST, _LATER = range(2)
"""Rounds with times of their own: all after the first are alike."""


@dataclass(frozen=True, eq=False)
class ActivePaths:
    """A micro-batch on P ranks, in N rows.

    Attributes:
        is_active: `[N, P]` whether the rank has a node in row i.
        starts: N arrays, the first rank of each node of row i; ranks without one stand alone.
        degree: `[N, P]` degree of the node.
        node: `[N, P]` number of the node, depth by depth; -1 where there is none.
        num_members: `[N, P]` ring members of the node.
        splits: P lists, each row in which the rank has a node, and how that is split.
        phase_us: per pass, phase and first or later round `[N, P]` time of one layer, latency
            included.
        tokens: `[P]` tokens of each rank.
    """

    is_active: BoolArray
    starts: tuple[IntArray, ...]
    degree: IntArray
    node: IntArray
    num_members: IntArray
    splits: tuple[tuple[tuple[int, Split], ...], ...]
    phase_us: dict[tuple[Pass, Phase, int], FloatArray]
    tokens: IntArray
    _orders: dict[tuple[Pass, bool], list[tuple[Step, BoolArray]]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows (N): nodes of the longest active path, more where shorter ones reach beyond it."""
        return len(self.is_active)

    def sync(self, row: int, times_us: FloatArray) -> FloatArray:
        """`[P]` for each rank the latest time of the ranks of its node in a row."""
        latest_us = np.maximum.reduceat(times_us, self.starts[row])
        latest: FloatArray = np.repeat(latest_us, self._run_sizes[row])
        return latest

    @cached_property
    def _run_sizes(self) -> list[IntArray]:
        return [np.diff(starts, append=len(self.tokens)) for starts in self.starts]

    def step_us(self, step: Step) -> FloatArray:
        """`[P]` time of a step on each rank, if its node has it; the step's depth is the row."""
        later = _LATER if step.round else _FIRST
        step_us: FloatArray = self.phase_us[step.pass_, step.phase, later][step.node.depth]
        return step_us

    def communicates(self, step: Step) -> BoolArray:
        """`[P]` whether a step of an exchange puts something on the network."""
        row = step.node.depth
        members = self.num_members[row]
        ranks = members if step.is_between_members else self.degree[row] // members
        sends: BoolArray = ranks > 1
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
        kinds = {splits: kind for kind, splits in enumerate(dict.fromkeys(self.splits))}
        schedules: list[tuple[Step, ...]] = []
        for splits in kinds:
            split_of = {Node(row, 0): split for row, split in splits}
            schedules.append(build_schedule([*split_of], pass_, overlap, split_of))
        steps = list(dict.fromkeys(step for schedule in schedules for step in schedule))
        number = {step: place for place, step in enumerate(steps)}
        longest = max(map(len, schedules), default=0)
        numbers = np.full((len(schedules), longest + 1), len(steps))  # the end: no step
        for kind, schedule in enumerate(schedules):
            numbers[kind, : len(schedule)] = [number[step] for step in schedule]
        own = numbers[[kinds[splits] for splits in self.splits]]
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


def active_paths(
    plan: Plan, micro_batch: int, cost: CostModel, orders: Sequence[Order] = ()
) -> ActivePaths:
    """Lays out one micro-batch of a plan, with the times the cost model predicts for one layer.

    Args:
        plan: the plan.
        micro_batch: which of its micro-batches.
        cost: the cost model.
        orders: in which order each tree runs its nodes; root first if there are none. C times as
            many lay out C copies of all ranks, side by side.
    """
    tree = plan.tree
    orders = orders or [ROOT_FIRST] * (tree.num_ranks // tree.max_degree)
    num_at = [tree.num_nodes(depth) for depth in range(tree.num_depths)]
    first, num_nodes = np.cumsum([0, *num_at]), sum(num_at)
    number_of = {node: place for place, node in enumerate(tree.nodes())}
    is_active, members_of = np.zeros(num_nodes, dtype=bool), np.ones(num_nodes, dtype=np.int64)
    split_of = [ULYSSES] * num_nodes
    for active in plan.active_nodes(micro_batch):
        own = number_of[active]
        is_active[own], split_of[own] = True, plan.split_of(active, micro_batch)
        members_of[own] = split_of[own].num_members
    # [depths, lanes]: a lane is one rank of one copy, and lists its depths as it runs them.
    listed = np.array([whole_order(order, tree.num_depths) for order in orders]).T
    depth = np.repeat(listed, tree.max_degree, axis=1)
    copy, rank = np.divmod(np.arange(depth.shape[1]), tree.num_ranks)
    degree_at = np.array(tree.degrees[::-1])
    number = first[depth] + rank // degree_at[depth]
    place, lane = np.nonzero(is_active[number])
    row = _rows(is_active[number], depth)[place, lane]
    shape = int(row.max(initial=-1)) + 1, len(rank)
    node = np.full(shape, -1, dtype=np.int64)
    degree = np.ones(shape, dtype=np.int64)
    node[row, lane] = number[place, lane]
    degree[row, lane] = degree_at[depth[place, lane]]
    node_us = _node_us(plan, micro_batch, cost, number_of)
    return ActivePaths(
        is_active=node >= 0,
        starts=tuple(_run_starts(np.where(line < 0, -1, line + num_nodes * copy)) for line in node),
        degree=degree,
        node=node,
        num_members=np.where(node >= 0, members_of[node], 1),
        splits=tuple(
            tuple((place, split_of[line[place]]) for place in np.flatnonzero(line >= 0).tolist())
            for line in node.T
        ),
        phase_us={key: each_us[node] * (node >= 0) for key, each_us in node_us.items()},
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
            if split.backend.is_native:
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
