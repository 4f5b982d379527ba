"""What the NSP paper proves (arXiv 2609.22755, appendices A and B), tried on our trees."""

import random
from itertools import product

import numpy as np
import pytest

from megatron_nsp.cost.score import SampleTimes
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import Node, SPTree


def best_imbalance(work: list[int], num_groups: int) -> tuple[float, list[int]]:
    """The least of the largest group's work over the mean, of all partitions; and its groups."""
    best: list[int] | None = None
    for groups in product(range(num_groups), repeat=len(work) - 1):
        loads = [0] * num_groups
        loads[0] += work[0]  # groups are alike: the first sample's does not matter
        for group, amount in zip(groups, work[1:], strict=True):
            loads[group] += amount
        if best is None or max(loads) < max(best):
            best = loads
    assert best is not None
    return max(best) * num_groups / sum(work), sorted(best, reverse=True)


@pytest.mark.parametrize("seed", range(25))
def test_a_the_best_imbalance_never_rises_when_a_uniform_degree_doubles(seed: int) -> None:
    rng = random.Random(seed)
    work = [int(10 ** (4 * rng.random())) + 1 for _ in range(rng.randint(2, 7))]
    before, loads = best_imbalance(work, 4)
    for num_groups in (2, 1):
        after, after_loads = best_imbalance(work, num_groups)
        assert after <= before + 1e-12
        mean, half = sum(loads) / len(loads), len(loads) // 2
        if loads[0] > mean:
            rho = (loads[half] - mean) / (loads[0] - mean)
            assert -1 - 1e-12 <= rho <= 1
            assert after - 1 <= (1 + rho) / 2 * (before - 1) + 1e-12
        before, loads = after, after_loads


def laminar_groups(rng: random.Random, ranks: list[int]) -> list[list[int]]:
    """A random laminar family of groups whose sizes are powers of two."""
    groups = [ranks] if rng.random() < 0.7 else []
    if len(ranks) > 1:
        half = len(ranks) // 2
        shuffled = rng.sample(ranks, len(ranks))
        groups += laminar_groups(rng, shuffled[:half]) + laminar_groups(rng, shuffled[half:])
    return groups


def relabel(ranks: list[int], groups: list[list[int]], start: int, number: dict[int, int]) -> None:
    """Numbers the ranks from `start` on such that every group becomes an aligned block (lemma 2).

    Largest groups first, one after the other: each starts at a multiple of its own size.
    """
    inside = [group for group in groups if set(group) < set(ranks)]
    largest = [g for g in inside if not any(set(g) < set(other) for other in inside)]
    for group in sorted(largest, key=len, reverse=True):
        if group[0] not in number:  # the same group may be there twice
            relabel(group, inside, start, number)
            start += len(group)
    for rank in ranks:
        if rank not in number:
            number[rank] = start
            start += 1


@pytest.mark.parametrize("seed", range(40))
def test_b_every_laminar_schedule_is_a_tree_schedule_with_the_same_makespan(seed: int) -> None:
    rng, tree = random.Random(seed), SPTree(16, (1, 2, 4, 8, 16))
    groups = laminar_groups(rng, list(range(16))) or [[0]]
    jobs = [rng.choice(groups) for _ in range(rng.randint(1, 30))]
    lengths = [rng.randint(1, 1000) for _ in jobs]
    loads = [0.0] * 16
    for group, length in zip(jobs, lengths, strict=True):
        for rank in group:
            loads[rank] += length / len(group)
    number: dict[int, int] = {}
    relabel(list(range(16)), groups, 0, number)
    nodes = []
    for group in jobs:
        block = sorted(number[rank] for rank in group)
        node = tree.node(len(group), block[0] // len(group))
        assert block == list(tree.ranks(node)), (group, block)
        nodes.append(node)
    plan = Plan.from_nodes(tree, lengths, nodes)
    each = np.array(lengths)[:, None] / np.array(tree.degrees)
    times = SampleTimes(tree, plan.lengths, each, 2 * each, np.zeros(5), 0.0)
    column = tree.column_of_depth(plan.depth)
    score = times.score(column, plan.index, plan.micro_batch, 1)
    assert score.load_us == pytest.approx(3 * max(loads))
    assert sorted(score.fwd_us[0]) == pytest.approx(sorted(loads))


def test_b_crossing_groups_have_no_tree_schedule() -> None:
    tree = SPTree(4, (1, 2, 4))
    for a in range(2):
        for b in range(2):
            one, other = set(tree.ranks(Node(1, a))), set(tree.ranks(Node(1, b)))
            assert one == other or not one & other
