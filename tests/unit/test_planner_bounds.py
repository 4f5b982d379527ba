"""Pure tests of the lower bound: no plan is below it, and it is the one the formula defines."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nsp.planner import plan_batch
from megatron_nsp.planner.bounds import lower_bound_us
from tests.unit.planner_cases import brute_force_us, cluster, drawn, workstation
from tests.unit.scorer import tightest_bound_us
from tests.unit.test_planner_cost import constants

TINY = [
    (cluster(4, 4), 4, 200_000),
    (workstation(4, (1, 2, 4)), 4, 4_000),
    (workstation(6, (1, 3)), 4, 4_000),
    (workstation(2, (1, 2)), 6, 4_000),
]


@settings(max_examples=60, deadline=None, derandomize=True)
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
        (cluster(), drawn("paper-mix", 3, 400_000)),
        (cluster(), [190_000, 10]),
        (workstation(12, (1, 3, 6, 12)), [5000, 4000, 100, 7]),
        (workstation(4, (1, 2, 4)), [4000, 4000, 4000]),
    ],
)
@pytest.mark.parametrize("budget", [None, 14_000])
def test_the_bound_is_the_formula(cost, lengths, budget) -> None:
    report_of = plan_batch(lengths, cost.tree, cost, token_budget=budget, num_micro_batches=None)
    expected = tightest_bound_us(report_of.plan.to_dict(), constants(cost), budget)
    assert report_of.report.bound_us == pytest.approx(expected, rel=1e-9)


def test_a_budget_that_forbids_small_degrees_raises_the_bound() -> None:
    times = workstation(4, (1, 2, 4)).sample_times(np.array([4000] * 4))
    assert lower_bound_us(times, 1000) > lower_bound_us(times, 4000) == lower_bound_us(times)
    half = workstation(4, (1, 2, 4)).sample_times(np.array([2000] * 4))
    assert lower_bound_us(half, 999) > lower_bound_us(half, 1000) == lower_bound_us(half, 1999)
    assert lower_bound_us(times.take(np.array([], dtype=np.int64))) == 0
