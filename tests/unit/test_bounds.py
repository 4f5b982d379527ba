"""Pure tests of the lower bound: no plan is below it, and it is what the formulas define."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nsp.cost.bounds import lower_bound_us
from megatron_nsp.planner import plan_batch
from megatron_nsp.testing.scorer import mixture_bound_us, work_bound_us
from tests.unit.planner_cases import brute_force_us, cluster, drawn, moe, workstation
from tests.unit.test_cost_model import constants

TINY = [
    (cluster(4, 4), 4, 200_000),
    (workstation(4, (1, 2, 4)), 4, 4_000),
    (workstation(6, (1, 3)), 4, 4_000),
    (workstation(2, (1, 2)), 6, 4_000),
    (moe(4, 2, (1, 2, 4)), 4, 90_000),
    (moe(4, 4, (1, 2)), 4, 90_000),
    (moe(4, 4, (1,)), 5, 30_000),
]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_no_plan_is_below_the_bound(data) -> None:
    cost, most, longest = data.draw(st.sampled_from(TINY))
    lengths = np.array(data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=most)))
    budget = data.draw(st.sampled_from([None, longest // 2, longest]))
    times = cost.sample_times(lengths)
    if budget is not None and lengths.max() > budget * cost.tree.max_degree:
        return
    best_us = brute_force_us(dataclasses.replace(times, latency_us=0 * times.latency_us), budget)
    assert lower_bound_us(times, budget) <= best_us * (1 + 1e-12)


@pytest.mark.parametrize(
    ("cost", "lengths"),
    [
        (cluster(), drawn("paper-mix", 3, 150_000)),
        (cluster(), [190_000, 10]),
        (workstation(12, (1, 3, 6, 12)), [5000, 4000, 100, 7]),
        (workstation(4, (1, 2, 4)), [4000, 4000, 4000]),
        (moe(16, 8), drawn("wikipedia", 1, 60_000, 90_000)),
        (moe(8, 4, (1, 2)), [9000, 8000, 7000, 10]),
        (dataclasses.replace(moe(8, 4), recompute="selective"), [60_000, 9000, 8000, 7000, 10]),
    ],
)
@pytest.mark.parametrize("budget", [None, 14_000])
def test_the_bound_is_the_formula(cost, lengths, budget) -> None:
    found = plan_batch(lengths, cost.tree, cost, token_budget=budget, num_micro_batches=None)
    what = found.plan.to_dict(), constants(cost), budget
    by_work_us = work_bound_us(*what)
    larger_us = max(by_work_us, mixture_bound_us(*what))
    # The bound by mixture is looked at in steps and leaves out what short samples lack.
    least_us = by_work_us + 0.6 * (larger_us - by_work_us)
    assert least_us * (1 - 1e-9) <= found.report.bound_us <= larger_us * (1 + 1e-9)


@pytest.mark.parametrize(("cost", "gain"), [(moe(64, 8), 1.004), (cluster(), 1.002)])
def test_time_that_long_samples_leave_free_in_forward_counts(cost, gain) -> None:
    lengths = drawn("wikipedia", 0)
    result = plan_batch(lengths, cost.tree, cost)
    by_work_us = work_bound_us(result.plan.to_dict(), constants(cost))
    assert gain * by_work_us < result.report.bound_us <= result.report.load_no_latency_us


def test_a_leaf_does_not_do_its_experts_work_alone() -> None:
    cost = moe(4, 4, (1,))
    times = cost.sample_times(np.array([5000]))
    own_us = float((times.fwd_us + times.bwd_us)[0, 0] - times.expert_us.sum())
    shared_us = own_us + float(times.expert_us.sum()) / 4
    assert lower_bound_us(times) == pytest.approx(shared_us)
    assert cost.score(plan_batch([5000], cost.tree, cost).plan).load_no_latency_us == pytest.approx(
        shared_us
    )


def test_a_budget_that_forbids_small_degrees_raises_the_bound() -> None:
    times = workstation(4, (1, 2, 4)).sample_times(np.array([4000] * 4))
    assert lower_bound_us(times, 1000) > lower_bound_us(times, 4000) == lower_bound_us(times)
    half = workstation(4, (1, 2, 4)).sample_times(np.array([2000] * 4))
    assert lower_bound_us(half, 999) > lower_bound_us(half, 1000) == lower_bound_us(half, 1999)
    assert lower_bound_us(times.take(np.array([], dtype=np.int64))) == 0
