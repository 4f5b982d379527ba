"""Pure tests of the issue order. Cases H1 (schedule part) and I2 (trace part)."""

import random
from graphlib import TopologicalSorter
from itertools import combinations, pairwise

import pytest

from megatron_nsp.plan.order import ALL_ROOT_FIRST, MAX_CHOICES, NodeOrders, in_order, safe_orders
from megatron_nsp.plan.phases import Pass, Phase, Queue
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.schedule import Step, build_schedule, collectives, communicates
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.testing.random_plans import (
    random_lengths,
    random_native_nodes,
    random_orders,
    random_plan,
    random_splits,
    random_tree,
)


def plans(count: int) -> list[Plan]:
    rng = random.Random(4)
    trees = [random_tree(rng, 8, 24, 24) for _ in range(count)]
    return [random_plan(rng, tree, random_lengths(rng, 10, 60)) for tree in trees]


def rank_collectives(
    plan: Plan, overlap: bool, orders: NodeOrders = ALL_ROOT_FIRST
) -> list[list[Step]]:
    """The collectives of each rank over forward and backward of one layer."""
    degree_of = {node: plan.tree.degree(node) for node in plan.tree.nodes()}
    splits = {node: split for (_, node), split in plan.splits.items()}
    lists = []
    for rank in range(plan.tree.num_ranks):
        steps: list[Step] = []
        for pass_, order in orders.of_rank(0, plan.tree, rank).items():
            path = in_order(plan.active_path(rank), order)
            issued = build_schedule(path, pass_, overlap, splits)
            steps += collectives(issued, degree_of, splits)
        lists.append(steps)
    return lists


def split_plans(count: int) -> list[Plan]:
    """Plans whose nodes are rings, gather keys, or both split heads and tokens."""
    rng = random.Random(5)
    return [random_splits(rng, plan, 4, 2) for plan in plans(count)]


def native_plans(count: int) -> list[Plan]:
    """Plans of which Transformer Engine runs some nodes beside those of all other kinds."""
    rng = random.Random(6)
    return [random_native_nodes(rng, plan) for plan in split_plans(count)]


def orders_of(plans: list[Plan], is_root_first: bool) -> list[NodeOrders]:
    rng = random.Random(6)
    return [ALL_ROOT_FIRST if is_root_first else random_orders(rng, plan) for plan in plans]


@pytest.mark.parametrize("is_root_first", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_i2_ranks_list_the_collectives_they_share_in_the_same_order(
    overlap: bool, is_root_first: bool
) -> None:
    drawn = plans(200) + split_plans(200) + native_plans(200)
    for plan, orders in zip(drawn, orders_of(drawn, is_root_first), strict=True):
        lists = rank_collectives(plan, overlap, orders)
        for one, other in combinations(lists, 2):
            assert [s for s in one if s in other] == [s for s in other if s in one]


@pytest.mark.parametrize("is_root_first", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_i2_one_total_order_fits_all_ranks_so_nothing_can_wait_in_a_circle(
    overlap: bool, is_root_first: bool
) -> None:
    drawn = plans(200) + split_plans(200) + native_plans(200)
    for plan, orders in zip(drawn, orders_of(drawn, is_root_first), strict=True):
        sorter: TopologicalSorter[Step] = TopologicalSorter()
        for steps in rank_collectives(plan, overlap, orders):
            for before, after in pairwise(steps):
                sorter.add(after, before)
        sorter.prepare()  # raises CycleError


def test_safe_orders_grow_at_both_ends() -> None:
    assert safe_orders([]) == ((),)
    assert safe_orders([2]) == ((2,),)
    assert safe_orders([0, 3]) == ((0, 3), (3, 0))
    assert safe_orders([0, 1, 2]) == ((0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0))
    for depths in range(1, 9):
        orders = safe_orders(range(depths))
        assert orders[0] == tuple(range(depths))
        assert len(orders) == len(set(orders)) == 2 ** min(depths - 1, MAX_CHOICES)
        assert {tuple(sorted(order)) for order in orders} == {tuple(range(depths))}


def test_other_orders_would_lock_ranks_up() -> None:
    # Ranks 0 and 1 have a leaf, ranks 2 and 3 none: with it between root and half they disagree.
    tree = SPTree(4, (1, 2, 4))
    nodes = [tree.node(4, 0), tree.node(2, 0), tree.node(1, 0)]
    degree_of = {node: tree.degree(node) for node in tree.nodes()}
    plan = Plan.from_nodes(tree, [8, 8, 8], nodes)
    for order, is_safe in (((0, 2, 1), False), ((2, 0, 1), True)):
        lists = [
            collectives(
                build_schedule(in_order(plan.active_path(rank), order), Pass.FWD, True), degree_of
            )
            for rank in (0, 1)
        ]
        assert (lists[0] == lists[1]) is is_safe


@pytest.mark.parametrize("overlap", [True, False])
def test_h1_each_node_has_one_prologue_and_one_epilogue_in_each_pass(overlap: bool) -> None:
    for plan in plans(50):
        for rank, steps in enumerate(rank_collectives(plan, overlap)):
            wide = [n for n in plan.active_path(rank) if plan.tree.degree(n) > 1]
            expected = {
                Step(pass_, node, phase)
                for pass_ in Pass
                for node in wide
                for phase in (Phase.PROLOGUE, Phase.EPILOGUE)
            }
            assert set(steps) == expected and len(steps) == 4 * len(wide)


@pytest.mark.parametrize("overlap", [True, False])
def test_phases_of_a_node_keep_their_order(overlap: bool) -> None:
    for plan in plans(50):
        for rank in range(plan.tree.num_ranks):
            steps = build_schedule(plan.active_path(rank), Pass.FWD, overlap)
            for node in plan.active_path(rank):
                phases = [s.phase for s in steps if s.node == node]
                assert phases == [Phase.PROLOGUE, Phase.COMPUTE, Phase.EPILOGUE]


def test_streaming_issues_the_next_prologue_before_this_compute() -> None:
    path = SPTree(8, (1, 2, 4, 8)).path(5)
    steps = build_schedule(path, Pass.FWD, overlap=True)
    for this, following in pairwise(path):
        prologue = steps.index(Step(Pass.FWD, following, Phase.PROLOGUE))
        assert prologue < steps.index(Step(Pass.FWD, this, Phase.COMPUTE))
    queue = [s for s in steps if s.queue is Queue.COMMUNICATION]
    assert queue[0].node == queue[2].node == path[0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pass_", Pass)
def test_nothing_is_on_its_way_while_a_native_node_runs(pass_: Pass, overlap: bool) -> None:
    num_native = 0
    for plan in native_plans(200):
        splits = {node: split for (_, node), split in plan.splits.items()}
        for rank in range(plan.tree.num_ranks):
            sent: list[tuple] = []  # prologues that compute waits for, gradients that an epilogue
            for step in build_schedule(plan.active_path(rank), pass_, overlap, splits):
                key = step.node, step.round
                if step.phase is Phase.NATIVE:
                    num_native += 1
                    assert not sent and splits[step.node].backend.is_native
                elif step.phase in (Phase.PROLOGUE, Phase.RETURN):
                    sent.append((step.phase, *key))
                elif step.phase is Phase.COMPUTE:
                    sent.remove((Phase.PROLOGUE, *key))
                else:
                    sent = [each for each in sent if each[:2] != (Phase.RETURN, step.node)]
            assert not sent
    assert num_native > 200


def test_a_native_node_is_one_step_between_what_others_send() -> None:
    path = SPTree(8, (1, 2, 4, 8)).path(0)
    splits = {path[0]: Split(2), path[1]: Split(4, "te-p2p")}
    names = {node: str(depth) for depth, node in enumerate(path)}
    letters = {phase: phase.name[0] for phase in Phase}
    written = []
    for pass_ in Pass:
        steps = build_schedule(path, pass_, overlap=True, splits=splits)
        written.append(" ".join(f"{letters[s.phase]}{names[s.node]}.{s.round}" for s in steps))
    assert written == [
        "P0.0 P0.1 C0.0 C0.1 E0.0 N1.0 P2.0 P3.0 C2.0 E2.0 C3.0 E3.0",
        "P0.0 P0.1 C0.0 C0.1 R0.1 E0.0 N1.0 P2.0 P3.0 C2.0 E2.0 C3.0 E3.0",
    ]
    native = Step(Pass.FWD, path[1], Phase.NATIVE)
    assert communicates(native, 4, splits[path[1]]) and native.queue is Queue.COMPUTE


def test_a_ring_brings_the_next_keys_under_the_compute_of_these() -> None:
    path = SPTree(4, (1, 2, 4)).path(0)
    splits = {path[0]: Split(3)}
    names = {path[0]: "0", path[1]: "1"}
    letters = {Phase.PROLOGUE: "P", Phase.COMPUTE: "C", Phase.RETURN: "R", Phase.EPILOGUE: "E"}
    written = []
    for pass_ in Pass:
        steps = build_schedule(path[:2], pass_, overlap=True, splits=splits)
        written.append(" ".join(f"{letters[s.phase]}{names[s.node]}.{s.round}" for s in steps))
    assert written == [
        "P0.0 P0.1 C0.0 P0.2 C0.1 P1.0 C0.2 E0.0 C1.0 E1.0",
        "P0.0 P0.1 C0.0 P0.2 C0.1 R0.1 P1.0 C0.2 R0.2 E0.0 C1.0 E1.0",
    ]
