"""Which order of nodes ends a layer soonest, by the simulator's own clocks.

Every safe order is tried, all of them at once: the ranks are laid out side by side, one copy an
order. Trees share no exchange of attention, so each takes the order that is best for it. What comes
out depends on the plan and the cost model alone, to the last bit, so every rank of a job finds the
same.
"""

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.plan.arrays import FloatArray
from megatron_nsp.plan.order import NodeOrders, Order, safe_orders
from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.plan import Plan
from megatron_nsp.simulator.active_paths import ActivePaths, active_paths
from megatron_nsp.simulator.attention import Clocks, run_attention
from megatron_nsp.simulator.dense import run_dense

NUM_LAYERS = 2
"""Layers that are played: a rank that is late in the first begins the second late."""


def choose_orders(plan: Plan, cost: CostModel) -> NodeOrders:
    """The order of nodes for each micro-batch, pass and tree of a step whose phases stream.

    Never one that ends the layers played later than root first. Trees that share experts wait for
    one another there, so they all take the same order.

    Args:
        plan: the plan.
        cost: the cost model, of the same tree.
    """
    tree, order_of = plan.tree, {}
    num_trees = tree.num_ranks // tree.max_degree
    for micro_batch in range(plan.num_micro_batches):
        depths = sorted({node.depth for node in plan.active_nodes(micro_batch)})
        if len(depths) < 2:
            continue  # every rank runs one node at most
        orders = safe_orders(depths)
        each = [order for order in orders for _ in range(num_trees)]
        paths = active_paths(plan, micro_batch, cost, each)
        for pass_ in Pass:
            ranks_us = layers_end_us(paths, pass_, cost)
            ends_us = ranks_us.reshape(len(orders), num_trees, -1).max(axis=2)
            if cost.shape.expert_degree > 1:
                ends_us = np.repeat(ends_us.max(axis=1, keepdims=True), num_trees, axis=1)
            for tree_index, number in enumerate(ends_us.argmin(axis=0).tolist()):
                if number:  # the first of equals is root first
                    order_of[micro_batch, pass_, tree_index] = orders[number]
    return NodeOrders(order_of)


def layers_end_us(paths: ActivePaths, pass_: Pass, cost: CostModel) -> FloatArray:
    """`[P]` when each rank is done with `NUM_LAYERS` layers, attention and dense work."""
    zeros = np.zeros(len(paths.tokens))
    clocks = Clocks(zeros.copy(), zeros.copy())
    for _ in range(NUM_LAYERS):
        run_attention(paths, pass_, clocks, overlap=True)
        run_dense(paths, pass_, clocks, cost)
    return clocks.compute_us


def orders_of_trees(orders: NodeOrders, plan: Plan, micro_batch: int, pass_: Pass) -> list[Order]:
    """One order a tree, as `active_paths` takes them."""
    num_trees = plan.tree.num_ranks // plan.tree.max_degree
    return [orders.of_tree(micro_batch, index)[pass_] for index in range(num_trees)]
