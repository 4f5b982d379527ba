"""Pure tests of FlexSP: its cuts and its integer program against brute force, and whole plans."""

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import ExchangeRate, load_profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import BatchProblem, MicroBatchProblem, plan_batch
from megatron_nsp.planner.policies import flexsp
from megatron_nsp.planner.policies.flexsp_buckets import bucket_starts, micro_batch_starts
from megatron_nsp.planner.policies.flexsp_milp import (
    SolverLimit,
    offered_columns,
    offered_groups,
    place_in_groups,
)
from tests.unit.planner_cases import LARGE, cluster, drawn, workstation

EXACT = SolverLimit(num_nodes=10**6)
FITTED = CostModel(
    load_profile("flexsp-gpt-7b-a100"),
    ModelShape.from_hidden(32, 4096, 32, 32, 128),
    SPTree.powers_of_two(16, 16),
)


LATE = CostModel(  # the more ranks exchange, the longer they wait for the first byte
    dataclasses.replace(
        load_profile("h100-ib"),
        exchanges={"ulysses": {2: ExchangeRate(1e11, 10.0), 4: ExchangeRate(1e11, 90.0)}},
    ),
    LARGE,
    SPTree(4, (1, 2, 4)),
)


def cuts(num_samples: int, num_parts: int):
    """All ways to cut so many samples into so many runs that are not empty."""
    for inner in itertools.combinations(range(1, num_samples), num_parts - 1):
        yield [0, *inner, num_samples]


def sorted_lengths(most: int):
    return st.lists(st.integers(1, 60), min_size=1, max_size=most).map(
        lambda lengths: np.array(sorted(lengths, reverse=True))
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sorted_lengths(9), st.integers(1, 10))
def test_micro_batches_have_the_least_largest_token_sum(lengths, num_parts) -> None:
    num_parts_had = min(num_parts, len(lengths))

    def largest(cut: list[int]) -> int:
        return max(int(lengths[a:b].sum()) for a, b in itertools.pairwise(cut))

    starts = micro_batch_starts(lengths, num_parts).tolist()
    assert starts[0] == 0 and len(starts) == num_parts_had == len(set(starts))
    best = min(largest(cut) for cut in cuts(len(lengths), num_parts_had))
    assert largest([*starts, len(lengths)]) == best


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sorted_lengths(9), st.integers(1, 10))
def test_buckets_add_the_fewest_tokens(lengths, most) -> None:
    def added(cut: list[int]) -> int:
        return sum(int((lengths[a] - lengths[a:b]).sum()) for a, b in itertools.pairwise(cut))

    starts = bucket_starts(lengths, most).tolist()
    assert starts == sorted(set(starts)) and starts[0] == 0 and len(starts) <= most
    best = min(
        added(cut) for parts in range(1, most + 1) for cut in cuts(len(lengths), parts) if parts
    )
    assert added([*starts, len(lengths)]) == best


def test_the_cuts_of_the_docstring() -> None:
    lengths = np.array([9, 9, 7, 5, 5, 4, 2, 1])
    assert micro_batch_starts(lengths, 3).tolist() == [0, 1, 3]
    assert bucket_starts(lengths, 3).tolist() == [0, 3, 6]


def brute_force_ns(problem: MicroBatchProblem, most_groups: dict[int, int]) -> int | None:
    """The least time of the slowest group over all disjoint groups and all ways to fill them."""
    degrees = [problem.tree.degrees[k] for k in most_groups]
    best = None
    for counts in itertools.product(*(range(most + 1) for most in most_groups.values())):
        if sum(d * n for d, n in zip(degrees, counts, strict=True)) > problem.tree.num_ranks:
            continue
        columns = [k for k, n in zip(most_groups, counts, strict=True) for _ in range(n)]
        for groups in itertools.product(range(len(columns)), repeat=problem.num_samples):
            load, tokens = [0] * len(columns), [0] * len(columns)
            for sample, g in enumerate(groups):
                k = columns[g]
                load[g] += int(problem.total_ns[sample, k])
                load[g] += 2 * int(problem.latency_ns[k]) * (tokens[g] == 0)
                tokens[g] += int(problem.lengths[sample])
            budget = problem.token_budget
            fits = budget is None or all(
                held <= budget * problem.tree.degrees[k]
                for held, k in zip(tokens, columns, strict=True)
            )
            if fits and (best is None or max(load) < best):
                best = max(load)
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([workstation(4, (1, 2, 4)), cluster(4, 4), LATE, workstation(3, (1, 3))]),
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    st.sampled_from([None, 800, 1500]),
)
def test_the_program_finds_the_best_disjoint_groups(cost, lengths, budget) -> None:
    """At most four samples: every one is a bucket, so nothing is rounded up."""
    lengths = np.array(sorted(lengths, reverse=True))
    tree = cost.tree
    if budget is not None and lengths[0] > budget * tree.max_degree:
        return
    problem = BatchProblem(cost.sample_times(lengths), budget).in_one_micro_batch
    least = [min(d for d in tree.degrees if budget is None or n <= budget * d) for n in lengths]
    largest, taken = max(least), max(least) * least.count(max(least))
    most = {
        k: (tree.num_ranks if d >= largest else max(tree.num_ranks - taken, 0)) // d
        for k, d in enumerate(tree.degrees)
        if d > 1
    }
    best_ns = brute_force_ns(problem, most)
    placement = place_in_groups(problem, EXACT)
    if best_ns is None:
        assert placement is None
        return
    assert placement is not None and not len(placement.unplaced)
    held = {}
    for sample in range(len(lengths)):
        group = int(placement.column[sample]), int(placement.index[sample])
        held.setdefault(group, []).append(sample)
    slowest_ns = max(
        int(problem.total_ns[samples, k].sum() + 2 * problem.latency_ns[k])
        for (k, _), samples in held.items()
    )
    assert best_ns <= slowest_ns <= best_ns * 1.001 + 1
    ranks = [r for k, i in held for r in range(i * tree.degrees[k], (i + 1) * tree.degrees[k])]
    assert len(ranks) == len(set(ranks))


def test_degree_one_is_offered_only_where_there_is_no_other() -> None:
    assert [list(offered_columns(n)) for n in (1, 2, 4)] == [[0], [1], [1, 2, 3]]


def test_small_groups_are_cut_by_the_ranks_that_memory_forces() -> None:
    """Two samples of 350 tokens need four of the sixteen ranks each: eight are left for pairs."""
    problem = BatchProblem(
        FITTED.sample_times(np.array([350, 350, 150, 20])), 100
    ).in_one_micro_batch
    degrees = problem.degrees[offered_groups(problem)].tolist()
    assert degrees == [16, 8, 8, *[4] * 4, *[2] * 4]


def test_a_whole_plan_is_disjoint_complete_and_as_good_as_static_but_for_rounding() -> None:
    lengths = drawn("wikipedia", 0, 60_000, 16_000)
    budget = 6_000
    how = {"token_budget": budget, "num_micro_batches": None}
    result = plan_batch(lengths, FITTED.tree, FITTED, policy="flexsp", **how)
    plan = result.plan
    plan.validate()
    assert not len(plan.carried) and plan.over_budget_tokens() == 0
    for micro_batch in range(plan.num_micro_batches):
        assert all(len(plan.active_path(rank, micro_batch)) <= 1 for rank in range(16))
    assert all(FITTED.tree.degree(plan.node_of(j)) > 1 for j in range(plan.num_samples))
    others = plan_batch(lengths, FITTED.tree, FITTED, **how).report.policies
    offered = [name for name in others if name.startswith("static-") and name != "static-1"]
    assert result.report.load_us <= 1.05 * min(others[name] for name in offered)


def test_more_micro_batches_are_used_only_if_they_pay(monkeypatch) -> None:
    """A fourfold bias never pays off; without any, long samples in one of their own do."""
    lengths = [16_000, *[500] * 40]
    solved = []

    def watched(problem: MicroBatchProblem, limit: SolverLimit):
        solved.append(problem.num_samples)
        return place_in_groups(problem, limit)

    monkeypatch.setattr(flexsp, "place_in_groups", watched)
    plan = plan_batch(lengths, FITTED.tree, FITTED, num_micro_batches=8, policy="flexsp").plan
    assert plan.micro_batch.tolist() == [0] * 41
    assert solved == [41]  # the bounds of two to five micro-batches say enough


def test_a_fixed_number_of_micro_batches_carries_the_shortest() -> None:
    lengths = [4000, 4000, 3000, 1000, 500, 500]
    cost = workstation(4, (1, 2, 4))
    how = {"token_budget": 2000, "policy": "flexsp"}
    result = plan_batch(lengths, cost.tree, cost, num_micro_batches=1, **how)
    result.plan.validate()
    assert result.plan.carried.tolist() == [2, 3, 4, 5]
    whole = plan_batch(lengths, cost.tree, cost, num_micro_batches=2, **how)
    assert whole.report.num_micro_batches_used == 2 and not len(whole.plan.carried)


def test_what_no_grouping_holds_is_carried_too() -> None:
    """3900 tokens would fit four ranks of 1000, but not in pairs."""
    cost = workstation(4, (1, 2))
    how = {"token_budget": 1000, "policy": "flexsp"}
    plan = plan_batch([1400, 1400, 1100], cost.tree, cost, num_micro_batches=1, **how).plan
    assert plan.carried.tolist() == [2] and plan.token_load().tolist() == [700] * 4
    whole = plan_batch([1400, 1400, 1100], cost.tree, cost, num_micro_batches=None, **how).plan
    assert whole.num_micro_batches == 2 and not len(whole.carried)


def test_the_variant_with_a_clock_plans_as_well() -> None:
    lengths = [3000, 900, 800, 40]
    cost = workstation(4, (1, 2, 4))
    timed = plan_batch(lengths, cost.tree, cost, policy="flexsp-10s").report
    counted = plan_batch(lengths, cost.tree, cost, policy="flexsp").report
    assert timed.load_us == pytest.approx(counted.load_us, rel=1e-3)


WITHOUT_SCIPY = """
import sys
sys.modules["scipy"] = None
from megatron_nsp.planner import plan_batch
from megatron_nsp.planner import check_can_train
from tests.unit.planner_cases import workstation
cost = workstation(2, (1, 2))
plan_batch([5, 6], cost.tree, cost)
for call in (
    lambda: plan_batch([5, 6], cost.tree, cost, policy="flexsp"),
    lambda: check_can_train("flexsp"),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_without_scipy_only_flexsp_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SCIPY], capture_output=True, text=True, check=True
    )
    expected = "policy flexsp needs the package scipy: pip install 'megatron-nsp[milp]'"
    assert done.stdout.splitlines() == [expected] * 2
