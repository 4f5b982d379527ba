"""Pure tests of plans: completeness, budget, digest, JSON. Case A2."""

import random

import numpy as np
import pytest

from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.testing.random_plans import random_lengths, random_plan, random_tree

TREE = SPTree(8, (1, 2, 4, 8))


def test_a2_fewer_samples_than_ranks_and_rows_are_independent() -> None:
    plan = Plan.from_nodes(TREE, [512] * 3, [TREE.node(8, 0), TREE.node(2, 1), TREE.node(1, 7)])
    load = plan.token_load()
    assert load.sum() == 1536 and load.tolist() == [64, 64, 320, 320, 64, 64, 64, 576]
    load += 1  # what a caller does with its numbers is no change of the plan
    assert plan.token_load().tolist() == [64, 64, 320, 320, 64, 64, 64, 576]
    with pytest.raises(ValueError, match="assignment destination is read-only"):
        plan.lengths[0] = 1


@pytest.mark.parametrize("lengths", [[], [512]])
def test_a2_none_and_one_sample(lengths: list[int]) -> None:
    plan = Plan.from_nodes(TREE, lengths, [TREE.node(8, 0)] * len(lengths))
    assert plan.token_load().sum() == sum(lengths)
    assert len(plan.active_nodes()) == len(lengths)
    assert Plan.from_json(plan.to_json()) == plan


def test_streams_are_longest_first_and_ties_go_by_number() -> None:
    plan = Plan.from_nodes(TREE, [3, 9, 3, 9, 1], [TREE.node(4, 1)] * 5)
    assert plan.samples_of(TREE.node(4, 1)).tolist() == [1, 3, 0, 2, 4]
    assert plan.samples_of(TREE.node(4, 0)).tolist() == []


def test_every_sample_is_in_exactly_one_stream_and_json_keeps_everything() -> None:
    rng = random.Random(0)
    for _ in range(100):
        tree = random_tree(rng, 8, 8, 8)
        plan = random_plan(rng, tree, random_lengths(rng, 12, 40))
        batches = [rng.randint(CARRIED, 2) for _ in range(plan.num_samples)]
        nodes = [
            plan.node_of(j) if batches[j] >= 0 else tree.node(1, 0) for j in range(plan.num_samples)
        ]
        plan = Plan.from_nodes(tree, plan.lengths, nodes, batches, 3)
        held = [
            sample
            for micro_batch in range(3)
            for node in plan.active_nodes(micro_batch)
            for sample in plan.samples_of(node, micro_batch).tolist()
        ]
        assert sorted(held + plan.carried.tolist()) == list(range(plan.num_samples))
        tokens = sum(int(plan.token_load(m).sum()) for m in range(3))
        assert tokens == int(plan.lengths.sum() - plan.lengths[plan.carried].sum())
        again = Plan.from_json(plan.to_json())
        assert again == plan and again.digest == plan.digest


def test_digest_sees_every_part() -> None:
    node, other = TREE.node(2, 0), TREE.node(2, 1)
    plans = [
        Plan.from_nodes(TREE, [5, 6], [node, node]),
        Plan.from_nodes(TREE, [5, 7], [node, node]),
        Plan.from_nodes(TREE, [5, 6], [node, other]),
        Plan.from_nodes(TREE, [5, 6], [node, node], [0, 1], 2),
        Plan.from_nodes(TREE, [5, 6], [node, node], [0, 0], 2),
        Plan.from_nodes(TREE, [5, 6], [node, node], token_budget=6),
        Plan.from_nodes(SPTree(8, (1, 2, 4)), [5, 6], [node, node]),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("lengths", "nodes", "micro_batch", "budget", "message"),
    [
        ([5, 0], [Node(3, 0)] * 2, [0, 0], None, "sample 1 has 0 tokens, at least 1 needed"),
        ([5, 5], [Node(3, 0), Node(3, 8)], [0, 0], None, r"1 is on node \(depth 3, index 8\)"),
        ([5, 5], [Node(4, 0), Node(3, 0)], [0, 0], None, r"0 is on node \(depth 4, index 0\)"),
        ([5, 5], [Node(3, 0)] * 2, [0, 1], None, "sample 1 is in micro-batch 1, of 1"),
        (
            [5, 5],
            [Node(3, 0)],
            [0, 0],
            None,
            r"one node and one micro-batch a sample, got arrays of \[1, 2\]",
        ),
        ([5, 5], [Node(3, 0)] * 2, [0, 0], 9, "holds 10 tokens, over the token budget of 9"),
    ],
)
def test_broken_plans_are_refused(
    lengths: list[int],
    nodes: list[Node],
    micro_batch: list[int],
    budget: int | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_nodes(TREE, lengths, nodes, micro_batch, token_budget=budget)


def test_token_load_counts_what_layouts_hold() -> None:
    plan = Plan.from_nodes(SPTree(4, (1, 2, 4)), [7, 3], [Node(0, 0), Node(1, 1)])
    assert np.array_equal(plan.token_load(), [1, 2, 2 + 1, 2 + 2])


def test_the_node_of_a_carried_sample_says_nothing() -> None:
    tree = SPTree(4, (1, 2, 4))
    plans = [
        Plan.from_nodes(tree, [5, 7], [tree.node(4, 0), node], micro_batch=[0, CARRIED])
        for node in (tree.node(4, 0), tree.node(1, 3))
    ]
    assert plans[0] == plans[1] == Plan.from_json(plans[0].to_json())
