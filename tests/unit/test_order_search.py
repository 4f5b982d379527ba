"""Pure tests of the order in which ranks run their nodes, and of the search for it."""

import dataclasses
import itertools
import random

import pytest

from megatron_nsp.plan.order import in_order
from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.schedule import build_schedule
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.simulator.active_paths import active_paths
from megatron_nsp.simulator.order_search import choose_orders, layers_end_us, orders_of_trees
from megatron_nsp.testing.random_plans import (
    random_native_nodes,
    random_orders,
    random_plan,
    random_splits,
)
from tests.unit.planner_cases import cluster, workstation


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_steps_in_one_order_are_every_rank_s_own_schedule(seed: int) -> None:
    rng = random.Random(seed)
    tree = SPTree(8, rng.choice(((1, 2, 4, 8), (1, 2, 4))))
    plan = random_splits(rng, random_plan(rng, tree, [50, 60, 70, 80, 90, 4, 5, 6]), 8, 2)
    plan = random_native_nodes(rng, plan) if seed % 2 else plan
    orders, nodes = random_orders(rng, plan), list(tree.nodes())
    cost = dataclasses.replace(cluster(8, 8), tree=tree)
    for pass_, overlap in itertools.product(Pass, (True, False)):
        paths = active_paths(plan, 0, cost, orders_of_trees(orders, plan, 0, pass_))
        steps = paths.order(pass_, overlap)
        for rank in range(8):
            active = in_order(plan.active_path(rank, 0), orders.of_rank(0, tree, rank)[pass_])
            splits = {node: plan.split_of(node, 0) for node in active}
            own = build_schedule(active, pass_, overlap, splits)
            kept = [
                step._replace(node=nodes[paths.node[step.node.depth, rank]])
                for step, on in steps
                if on[rank]
            ]
            assert kept == list(own)


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_order_never_ends_later_than_root_first(seed: int) -> None:
    rng = random.Random(seed)
    cost = workstation(12, (1, 3, 6, 12)) if seed % 2 else cluster(16, 8)
    cost = dataclasses.replace(
        cost, profile=dataclasses.replace(cost.profile, inter_bytes_per_s=2e9)
    )
    lengths = [int(30_000 ** rng.random()) for _ in range(20)]
    plan = random_plan(rng, cost.tree, lengths)
    orders = choose_orders(plan, cost)
    assert choose_orders(plan, cost) == orders
    for pass_ in Pass:
        first, chosen = (
            layers_end_us(active_paths(plan, 0, cost, listed), pass_, cost)
            for listed in ((), orders_of_trees(orders, plan, 0, pass_))
        )
        by_tree = (cost.tree.num_ranks // cost.tree.max_degree, -1)
        first_us, chosen_us = (x.reshape(by_tree).max(axis=1) for x in (first, chosen))
        assert (chosen_us <= first_us).all()
        changed = [(0, pass_, index) in orders.order_of for index in range(by_tree[0])]
        assert (chosen_us < first_us).tolist() == changed


def test_the_larger_exchange_of_the_root_is_hidden_under_the_leaf() -> None:
    cost = workstation(4, (1, 2, 4))
    slow = dataclasses.replace(cost.profile, intra_bytes_per_s=2e7, exchanges={})
    cost = dataclasses.replace(cost, profile=slow)
    nodes = [cost.tree.node(4, 0)] + [cost.tree.node(1, rank) for rank in range(4)]
    plan = Plan.from_nodes(cost.tree, [400, 900, 900, 900, 900], nodes)
    # q, k, v go out in forward, dq, dk, dv come back in backward: leaf first, then leaf last.
    assert choose_orders(plan, cost).order_of == {(0, Pass.FWD, 0): (2, 0)}
