"""Pure tests of the plan layout. Cases C1, C2, C5 and D1, the parts that need no process."""

import random

import numpy as np
import pytest

from megatron_nsp.plan.layout import Segment, rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import slice_bounds
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.testing.random_plans import random_lengths, random_plan, random_tree
from tests.unit.planner_cases import cluster, drawn


def random_plans(count: int, seed: int) -> list[Plan]:
    rng = random.Random(seed)
    trees = (random_tree(rng, 8, 24, 24) for _ in range(count))
    return [random_plan(rng, tree, random_lengths(rng, 10, 60)) for tree in trees]


def test_the_drawn_example_of_the_module() -> None:
    tree = SPTree(2, (1, 2))
    plan = Plan.from_nodes(tree, [5, 2, 3], [tree.node(2, 0), tree.node(2, 0), tree.node(1, 1)])
    first, second = (rank_layout(plan, rank) for rank in range(2))
    assert first.segments == (Segment(0, 0, 3),)
    assert second.segments == (Segment(0, 3, 5), Segment(1, 0, 2), Segment(2, 0, 3))
    assert first.positions.tolist() == [0, 1, 2]
    assert second.positions.tolist() == [3, 4, 0, 1, 0, 1, 2]


def test_c1_no_token_is_lost_and_counts_differ_by_at_most_one() -> None:
    for plan in random_plans(200, seed=1):
        ranks = [rank_layout(plan, rank) for rank in range(plan.tree.num_ranks)]
        numbers = np.concatenate([layout.token_numbers(plan.lengths) for layout in ranks])
        assert sorted(numbers.tolist()) == list(range(int(plan.lengths.sum())))
        assert [layout.num_tokens for layout in ranks] == plan.token_load().tolist()
        for layout in ranks:
            assert all(max(p.rank_tokens) - min(p.rank_tokens) <= 1 for p in layout.slices)


def test_c1_fifteen_tokens_at_degrees_two_and_four() -> None:
    for degree in (2, 4):
        tree = SPTree(4, (1, 2, 4))
        plan = Plan.from_nodes(tree, [7, 5, 3], [tree.node(degree, 0)] * 3)
        assert plan.token_load().sum() == 15


def test_c2_samples_shorter_than_the_degree() -> None:
    tree = SPTree(8, (1, 2, 4, 8))
    for length in (1, 2, 3, 7, 8, 9, 15, 16, 17):
        plan = Plan.from_nodes(tree, [length], [tree.node(8, 0)])
        layouts = [rank_layout(plan, rank) for rank in range(8)]
        assert sum(layout.num_tokens for layout in layouts) == length
        assert all(layout.buffer_tokens >= 1 for layout in layouts)


def test_d1_positions_are_places_in_the_own_sample() -> None:
    for plan in random_plans(200, seed=2):
        expected = np.concatenate([np.arange(length) for length in plan.lengths])
        for rank in range(plan.tree.num_ranks):
            layout = rank_layout(plan, rank)
            held = layout.positions[: layout.num_tokens]
            assert np.array_equal(held, expected[layout.token_numbers(plan.lengths)])
            assert not layout.positions[layout.num_tokens :].any()


def test_c5_what_one_rank_sends_is_what_the_other_expects() -> None:
    for plan in random_plans(200, seed=3):
        layouts = [rank_layout(plan, rank) for rank in range(plan.tree.num_ranks)]
        for node in plan.active_nodes():
            members = [
                part
                for rank in plan.tree.ranks(node)
                for part in layouts[rank].slices
                if part.node == node
            ]
            for i, part in enumerate(members):
                assert part.rank_in_node == i and part.degree == len(members)
                # Tokens to heads: i sends its own rows to everyone, j expects rank_tokens[i] of i.
                assert all(other.rank_tokens[i] == part.num_tokens for other in members)


def test_filler_rows_follow_the_row_multiple() -> None:
    tree = SPTree(2, (1, 2))
    plan = Plan.from_nodes(tree, [5], [tree.node(1, 0)])
    assert [rank_layout(plan, rank).buffer_tokens for rank in range(2)] == [5, 1]
    assert [rank_layout(plan, rank, row_multiple=4).buffer_tokens for rank in range(2)] == [8, 4]


@pytest.mark.parametrize("name", ["wikipedia", "source-code", "paper-mix"])
def test_f4_long_tailed_batches_need_hardly_any_filler(name: str) -> None:
    cost = cluster(8, 8)
    for seed in range(5):
        lengths = drawn(name, seed, tokens=100_000, longest=30_000)
        plan = plan_batch(lengths, cost.tree, cost).plan
        ranks = [rank_layout(plan, rank) for rank in range(8)]
        num_rows = sum(layout.buffer_tokens for layout in ranks)
        assert sum(layout.num_filler_tokens for layout in ranks) < 0.01 * num_rows
        assert num_rows < 1.01 * lengths.sum()


def test_slice_bounds_cover_the_stream() -> None:
    for tokens in range(40):
        for degree in (1, 2, 3, 6, 8):
            bounds = slice_bounds(tokens, degree)
            assert bounds[0] == 0 and bounds[-1] == tokens and (np.diff(bounds) >= 0).all()
