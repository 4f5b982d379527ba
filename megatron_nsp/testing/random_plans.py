"""Random trees and plans, awkward on purpose: no planner would make most of them."""

import random
from dataclasses import replace

import numpy as np

from megatron_nsp.plan.backends import NATIVE, OURS
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.order import NodeOrders, safe_orders
from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree

CHAINS = ((1, 2, 4, 8), (1, 2, 8), (1, 4), (1, 2), (1, 8), (1,), (1, 3, 6), (1, 6))


def random_tree(rng: random.Random, max_ranks: int, num_heads: int, num_kv_heads: int) -> SPTree:
    """A tree of at most `max_ranks` ranks whose degrees split the heads."""
    while True:
        degrees = rng.choice(CHAINS)
        num_trees = max_ranks // degrees[-1]
        admissible = all(is_admissible(d, num_heads, num_kv_heads) for d in degrees)
        if num_trees and admissible:
            return SPTree(degrees[-1] * rng.randint(1, num_trees), degrees)


def random_uneven_tree(rng: random.Random, max_ranks: int) -> SPTree:
    """A tree of at most `max_ranks` ranks and at least two levels, whatever the heads allow."""
    degrees = rng.choice([chain for chain in CHAINS if len(chain) > 1])
    return SPTree(degrees[-1] * rng.randint(1, max_ranks // degrees[-1]), degrees)


def random_lengths(rng: random.Random, max_samples: int, max_length: int) -> list[int]:
    """A few samples; one-token samples and lengths below the degree are common."""
    count = rng.randint(1, max_samples)
    return [
        rng.choice((1, 2, 3, rng.randint(1, 9), rng.randint(1, max_length))) for _ in range(count)
    ]


def random_plan(rng: random.Random, tree: SPTree, lengths: list[int]) -> Plan:
    """Every sample on a random node; often only few nodes are used, so that ranks stay empty."""
    nodes = list(tree.nodes())
    pool = rng.sample(nodes, rng.randint(1, len(nodes)))
    return Plan.from_nodes(tree, lengths, [rng.choice(pool) for _ in lengths])


def random_splits(rng: random.Random, plan: Plan, num_heads: int, num_kv_heads: int) -> Plan:
    """The plan with nodes split at random, among heads as far as these allow."""
    splits = {}
    for node in plan.active_nodes():
        degree = plan.tree.degree(node)
        possible = [
            members
            for members in range(1, degree + 1)
            if degree % members == 0 and is_admissible(degree // members, num_heads, num_kv_heads)
        ]
        members = rng.choice(possible)
        if members > 1:
            splits[0, node] = Split(members, rng.choice(OURS))
    return replace(plan, splits=splits)


def random_orders(rng: random.Random, plan: Plan) -> NodeOrders:
    """A random safe order for each tree and pass of the first micro-batch."""
    orders = safe_orders(sorted({node.depth for node in plan.active_nodes()}))
    num_trees = plan.tree.num_ranks // plan.tree.max_degree
    return NodeOrders(
        {(0, pass_, tree): rng.choice(orders) for pass_ in Pass for tree in range(num_trees)}
    )


def random_native_nodes(rng: random.Random, plan: Plan, names: tuple[str, ...] = NATIVE) -> Plan:
    """The plan with about half of its nodes left to Transformer Engine."""
    splits = dict(plan.splits)
    for node in plan.active_nodes():
        degree = plan.tree.degree(node)
        if degree > 1 and rng.random() < 0.5:
            splits[0, node] = Split(degree, rng.choice(names))
    return replace(plan, splits=splits)


def random_step(rng: random.Random, num_ranks: int) -> Plan:
    """A plan of up to three micro-batches with carried samples, over exactly `num_ranks` ranks."""
    chains = [chain for chain in CHAINS if num_ranks % chain[-1] == 0]
    tree = SPTree(num_ranks, rng.choice(chains))
    one_micro_batch = random_plan(rng, tree, random_lengths(rng, 12, 60))
    num_micro_batches = rng.randint(1, 3)
    micro_batch = [rng.randint(CARRIED, num_micro_batches - 1) for _ in one_micro_batch.lengths]
    return replace(
        one_micro_batch, micro_batch=np.array(micro_batch), num_micro_batches=num_micro_batches
    )
