"""Pure tests of evening out: never slower, within the budget, and better than LPT where it can."""

import random

import numpy as np
import pytest

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.cost.score import SampleTimes
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import BatchProblem, MicroBatchProblem, plan_batch
from megatron_nsp.planner.policies.static import place_static
from megatron_nsp.planner.search.even_out import even_out, evened
from megatron_nsp.planner.search.placement import UNPLACED, MicroBatchState
from megatron_nsp.planner.search.search import search
from megatron_nsp.steps.lengths import draw_batch, load_table
from tests.unit.planner_cases import cluster, workstation


def leaves_only(
    times_us: list[float], num_ranks: int, budget: int | None = None
) -> MicroBatchProblem:
    """Samples of given times, whose lengths are those times, on ranks without larger nodes."""
    both = np.array(sorted(times_us, reverse=True), dtype=np.float64)[:, None]
    lengths: IntArray = both[:, 0].astype(np.int64)
    times = SampleTimes(SPTree(num_ranks, (1,)), lengths, both, 2 * both, np.zeros(1), 0.0)
    return MicroBatchProblem.from_times(times, budget)


@pytest.mark.parametrize(
    ("times_us", "num_ranks", "best_us"),
    [([5, 5, 4, 4, 3, 3, 3], 3, 9), ([3, 3, 2, 2, 2], 2, 6), ([7, 6, 5, 5, 4, 4, 3, 2], 2, 18)],
)
def test_where_lpt_is_not_best_the_best_is_found(
    times_us: list[float], num_ranks: int, best_us: int
) -> None:
    problem = leaves_only(times_us, num_ranks)
    placement = evened(problem, place_static(problem, 1))
    assert placement.load_ns == 3 * best_us * 1000


def test_it_stays_within_the_budget_on_the_way() -> None:
    problem = leaves_only([5, 5, 4, 4, 3, 3, 3], 3, budget=11)
    state = MicroBatchState(problem)
    state.add(0, np.arange(7), np.array([0, 1, 2, 2, 0, 1, 2]))
    even_out(state)
    assert state.rank_tokens().max() <= 11
    assert state.load_ns() == 3 * 9 * 1000


@pytest.mark.parametrize("seed", range(30))
def test_it_is_never_slower_and_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cost = cluster(16, 8) if seed % 2 else workstation(12, (1, 3, 6))
    lengths = np.sort([int(40_000 ** rng.random()) for _ in range(rng.randint(1, 90))])[::-1]
    budget = None
    if seed % 3:
        budget = int(lengths.sum()) // 8 + -(-int(lengths[0]) // cost.tree.max_degree)
    problem = BatchProblem(cost.sample_times(lengths.copy()), budget).in_one_micro_batch
    before = search(problem)
    after = evened(problem, before)
    assert after.load_ns <= before.load_ns
    assert np.array_equal(after.index == UNPLACED, before.index == UNPLACED)
    state = MicroBatchState(problem)
    for k in range(len(cost.tree.degrees)):
        samples = np.flatnonzero((after.column == k) & (after.index != UNPLACED))
        state.add(k, samples, after.index[samples])
    assert state.load_ns() == after.load_ns
    if budget is not None:
        assert state.rank_tokens().max() <= budget


def test_a_batch_of_few_samples_comes_within_half_a_percent_of_the_bound() -> None:
    """The published model of FlexSP, whose samples are multiples of 128 tokens."""
    shape, tree = ModelShape.from_hidden(32, 4096, 32, 32, 128), SPTree.powers_of_two(64)
    cost = CostModel(load_profile("flexsp-gpt-7b-a100"), shape, tree)
    for seed in range(3):
        drawn = draw_batch(load_table("wikipedia"), 490_000, 30_000, seed).lengths
        result = plan_batch(-(-drawn // 128) * 128, tree, cost, policy="search")
        bias_us = cost.profile.bias_us
        gap = (result.report.load_us - bias_us) / (result.report.bound_us - bias_us)
        assert gap < 1.005, (seed, gap)
