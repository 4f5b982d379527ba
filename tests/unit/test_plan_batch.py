"""Pure tests of whole-batch planning: micro-batches, token budget, carrying, determinism.

Cases A1, A2, A4, F4, L3.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_nsp.config import NSPConfig, build_tree
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import FittedModel, load_profile
from megatron_nsp.planner import plan_batch
from tests.unit.planner_cases import SMALL, cluster, drawn, ready_policies, workstation

ROOT = Path(__file__).resolve().parents[2]
FOUR = workstation(4, (1, 2, 4))
EIGHT = workstation(8, (1, 2, 4, 8))


def test_a1_six_ranks_with_degree_four_are_refused_twelve_are_a_forest() -> None:
    with pytest.raises(ValueError, match="degree 4 does not divide the 6 ranks"):
        build_tree(NSPConfig(max_degree=4), 6, 24, 24)
    for num_ranks in range(1, 65):
        for max_degree in (1, 2, 4, 8):
            if num_ranks % max_degree:
                continue
            tree = build_tree(NSPConfig(max_degree=max_degree), num_ranks, 24, 24)
            cost = CostModel(load_profile("cpu-gloo"), SMALL, tree)
            plan = plan_batch([3000, 900, 900, 5], tree, cost, policy="search").plan
            plan.validate()
            assert plan.token_load().sum() == 4805


@pytest.mark.parametrize("lengths", [[512, 512, 512], [512], []])
def test_a2_fewer_samples_than_ranks(lengths: list[int]) -> None:
    for policy in ready_policies(EIGHT.tree):
        plan = plan_batch(lengths, EIGHT.tree, EIGHT, policy=policy).plan
        placed = np.concatenate(
            [np.zeros(0, int), *(plan.samples_of(n) for n in plan.active_nodes())]
        )
        assert sorted(placed.tolist()) == list(range(len(lengths)))
        load = plan.token_load()
        held = load.tolist()
        assert load.sum() == sum(lengths)
        load += 1  # what a caller does with its numbers is no change of the plan
        assert plan.token_load().tolist() == held


@pytest.mark.parametrize(("num_micro_batches", "num_carried"), [(1, 1), (2, 0), (3, 0), (None, 0)])
@pytest.mark.parametrize("policy", ["auto", "search", "two-level", "root", "static-2"])
def test_a4_a_budget_of_2000_for_three_samples_of_4000(num_micro_batches, num_carried, policy):
    result = plan_batch(
        [4000] * 3,
        FOUR.tree,
        FOUR,
        token_budget=2000,
        num_micro_batches=num_micro_batches,
        policy=policy,
    )
    plan = result.plan
    plan.validate()
    assert plan.num_micro_batches == (num_micro_batches or 2)
    assert plan.carried.tolist() == [2][:num_carried]
    assert len(plan.carried) == num_carried
    assert plan.over_budget_tokens() == 0
    loads = [plan.token_load(m).max() for m in range(plan.num_micro_batches)]
    assert max(loads) <= 2000 and sum(load > 0 for load in loads) == 2 - num_carried


def test_a4_a_sample_that_never_fits_is_named_before_anything_else() -> None:
    plan_batch([2000 * 4], FOUR.tree, FOUR, token_budget=2000)
    message = "sample 1 of 8001 tokens needs 2001 tokens a rank at the largest degree 4, over the"
    with pytest.raises(ValueError, match=message + " token budget of 2000"):
        plan_batch([5, 8001, 9000], FOUR.tree, FOUR, token_budget=2000)


def test_a_budget_counts_the_fullest_slice_of_a_node() -> None:
    """2003 + 1998 tokens at degree 2 are slices of 2000 and 2001: one too many."""
    lengths = [2003, 1999, 1999, 1998]
    plan = plan_batch(lengths, FOUR.tree, FOUR, token_budget=2000, policy="static-2").plan
    plan.validate()
    assert plan.carried.tolist() == [3]
    fits = plan_batch(lengths, FOUR.tree, FOUR, token_budget=2001, policy="static-2").plan
    assert not len(fits.carried) and fits.token_load().max() == 2001


def test_policies_over_the_budget_are_left_out_of_the_portfolio() -> None:
    report = plan_batch([4000, 10], FOUR.tree, FOUR, token_budget=2000).report
    assert report.infeasible == ("static-1", "basp")  # basp refuses samples of two lengths
    others = {"two-level", "disjoint-lpt", "megatron-dynamic-cp"}
    assert set(report.policies) == {"static-2", "static-4", *others}


@settings(max_examples=100, deadline=None, derandomize=True)
@example([1, 201, 201], 100, None, "disjoint-lpt")
@given(
    st.lists(st.integers(1, 800), max_size=24),
    st.integers(100, 900),
    st.sampled_from([1, 2, 3, None]),
    st.sampled_from(["auto", "search", "two-level", "disjoint-lpt", "root", "leaves"]),
)
def test_the_budget_is_hard_and_every_step_makes_progress(lengths, budget, num, policy) -> None:
    cost = FOUR
    if max(lengths, default=0) > budget * (1 if policy == "leaves" else 4):
        with pytest.raises(ValueError, match=f"token budget of {budget}"):
            plan_batch(lengths, cost.tree, cost, token_budget=budget, policy=policy)
        return
    result = plan_batch(
        lengths, cost.tree, cost, token_budget=budget, num_micro_batches=num, policy=policy
    )
    plan = result.plan
    plan.validate()
    assert all(plan.token_load(m).max() <= budget for m in range(plan.num_micro_batches))
    assert num is None or plan.num_micro_batches == num
    held = plan.lengths[plan.micro_batch >= 0].sum()
    assert held + result.plan.lengths[result.plan.carried].sum() == sum(lengths)
    if lengths:
        assert plan.micro_batch[int(np.argmax(lengths))] >= 0
        assert num is not None or not len(plan.carried)


def test_a_whole_epoch_gets_through_a_tight_budget() -> None:
    """Carried samples come first in the next batch; none of them waits for ever."""
    waiting = drawn("paper-mix", 1, 60_000, 7_000).tolist()
    steps = 0
    while waiting:
        batch, waiting = waiting[:40], waiting[40:]
        plan = plan_batch(batch, FOUR.tree, FOUR, token_budget=2500, policy="search").plan
        assert len(plan.carried) < len(batch)
        waiting = [batch[j] for j in plan.carried] + waiting
        steps += 1
    assert steps < 20


def test_micro_batches_are_as_few_as_the_budget_needs() -> None:
    lengths = drawn("wikipedia", 0, 40_000, 4_000)
    for budget, least in ((None, 1), (11_000, 1), (5_200, 2), (2_700, 4)):
        result = plan_batch(lengths, FOUR.tree, FOUR, token_budget=budget, num_micro_batches=8)
        assert result.report.num_micro_batches_used == least
        assert result.plan.num_micro_batches == 8


def test_f4_thousands_of_short_samples_stay_at_the_leaves() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 4000)
    for policy in ("auto", "search"):
        started_s = time.perf_counter()
        result = plan_batch(lengths, EIGHT.tree, EIGHT, policy=policy)
        took_ms = 1e3 * (time.perf_counter() - started_s)
        plan, load = result.plan, result.plan.token_load()
        assert {EIGHT.tree.degree(node) for node in plan.active_nodes()} == {1}
        assert load.max() - load.min() <= 64
        assert took_ms / 100 < result.report.plan_ms <= took_ms  # milliseconds, of this call
    equal = plan_batch([64] * 8, EIGHT.tree, EIGHT).plan
    assert equal.token_load().tolist() == [64] * 8


def test_l3_equal_samples_are_dealt_by_number() -> None:
    plan = plan_batch([50] * 20, EIGHT.tree, EIGHT).plan
    assert plan.index.tolist() == [j % 8 for j in range(20)]
    assert plan.depth.tolist() == [3] * 20


DIGESTS = """
import json
import numpy as np
from megatron_nsp.planner import plan_batch
from tests.unit.planner_cases import cluster, drawn, workstation
small, large = workstation(12, (1, 3, 6, 12)), cluster()
batches = [
    (large, drawn("paper-mix", 5), None),
    (large, drawn("source-code", 5), 40_000),
    (large, np.full(300, 9000), None),
    (small, np.array([700, 700, 700, 90, 90, 90, 5, 5, 5] * 4), 900),
]
print(json.dumps([
    plan_batch(lengths, cost.tree, cost, token_budget=budget, num_micro_batches=None, policy=policy)
    .plan.digest
    for cost, lengths, budget in batches for policy in ("auto", "search")
]))
"""


def test_l3_the_same_digests_for_any_hash_seed_and_thread_count() -> None:
    found = set()
    for hash_seed, threads in (("0", "1"), ("1", "8"), ("2", "1")):
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "OMP_NUM_THREADS": threads,
                "OPENBLAS_NUM_THREADS": threads,
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(json.loads(found.pop()))) == 4  # batches differ, policies need not


def test_the_order_of_the_batch_changes_nothing_but_the_numbers() -> None:
    cost = cluster(16, 16)
    lengths = np.unique(drawn("paper-mix", 2, 300_000, 65_536))
    shuffled = np.random.default_rng(1).permutation(len(lengths))
    plan = plan_batch(lengths, cost.tree, cost).plan
    other = plan_batch(lengths[shuffled], cost.tree, cost).plan
    assert other.index.tolist() == plan.index[shuffled].tolist()
    assert other.depth.tolist() == plan.depth[shuffled].tolist()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lengths": [5, 0]}, "sample 1 has 0 tokens, at least 1 needed"),
        ({"policy": "best"}, "no policy best, only auto, search, static-1, static-2"),
        ({"token_budget": 0}, "token budget must be at least 1, got 0"),
        ({"num_micro_batches": 0}, "number of micro-batches must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(kwargs: dict, message: str) -> None:
    lengths = kwargs.pop("lengths", [5])
    with pytest.raises(ValueError, match=message):
        plan_batch(lengths, FOUR.tree, FOUR, **kwargs)


def test_skipping_hopeless_policies_changes_no_plan() -> None:
    rng, skipped = random.Random(5), 0
    for trial in range(40):
        cost = cluster(16, 8) if trial % 2 else workstation(12, (1, 3, 6))
        lengths = [int(60_000 ** rng.random()) for _ in range(rng.randint(1, 40))]
        room = -(-max(lengths) // cost.tree.max_degree) + sum(lengths) // 8
        budget = None if trial % 3 else room
        how = {"token_budget": budget, "num_micro_batches": 2}
        full = plan_batch(lengths, cost.tree, cost, **how)
        brief = plan_batch(lengths, cost.tree, cost, compares_all=False, **how)
        assert brief.plan == full.plan and brief.report.policy == full.report.policy
        skipped += len(full.report.policies) - len(brief.report.policies)
    assert skipped > 40


def test_a_token_balance_evens_out_tokens_but_never_forbids_a_sample() -> None:
    lengths = [8000] + [100] * 60
    free = plan_batch(lengths, EIGHT.tree, EIGHT, num_micro_batches=None).plan
    for balance in (1.0, 1.3, 2.0):
        result = plan_batch(
            lengths, EIGHT.tree, EIGHT, token_balance=balance, num_micro_batches=None
        )
        budget = max(int(balance * -(-14_000 // 8)), 1000)
        assert result.plan.token_budget == budget
        assert (
            max(
                result.plan.token_load(m).max() for m in range(result.report.num_micro_batches_used)
            )
            <= budget
        )
    assert free.token_load().max() > 1750
    both = plan_batch(lengths, EIGHT.tree, EIGHT, token_balance=2.0, token_budget=1900)
    assert both.plan.token_budget == 1900
    with pytest.raises(ValueError, match="the token balance must be at least 1, got 0"):
        plan_batch(lengths, EIGHT.tree, EIGHT, token_balance=0.9)


def test_scaling_all_lengths_scales_the_plan_where_time_is_quadratic() -> None:
    """Attention alone: twice the lengths take four times as long, on the same nodes."""
    rng = random.Random(8)
    fitted = FittedModel(1e-3, 0.0, 0.0, 0.5, 0.0)
    profile = dataclasses.replace(load_profile("flexsp-gpt-7b-a100"), fitted=fitted, bias_us=0.0)
    cost = CostModel(profile, SMALL, EIGHT.tree)
    for _ in range(10):
        lengths = np.array([64 * int(900 ** rng.random()) for _ in range(rng.randint(1, 40))])
        one = plan_batch(lengths, cost.tree, cost, policy="search")
        two = plan_batch(2 * lengths, cost.tree, cost, policy="search")
        assert two.report.load_us == pytest.approx(4 * one.report.load_us, rel=1e-3)


def test_renumbering_ranks_inside_a_parent_changes_no_load() -> None:
    rng = random.Random(9)
    lengths = [int(9000 ** rng.random()) for _ in range(25)]
    plan = plan_batch(lengths, EIGHT.tree, EIGHT).plan
    for degree in (1, 2, 4):  # swap the two halves of every node of twice the degree
        blocks = plan.index * np.array([EIGHT.tree.degree_at(d) for d in plan.depth]) // degree
        swaps = np.array([EIGHT.tree.degree_at(d) for d in plan.depth]) <= degree
        ratio = np.array([max(degree // EIGHT.tree.degree_at(d), 1) for d in plan.depth])
        index = np.where(swaps, (blocks ^ 1) * ratio + plan.index % ratio, plan.index)
        other = dataclasses.replace(plan, index=index)
        other.validate()
        one, two = EIGHT.score(plan), EIGHT.score(other)
        assert two.load_us == pytest.approx(one.load_us, rel=1e-12)
        assert sorted(two.rank_load_us) == pytest.approx(sorted(one.rank_load_us), rel=1e-12)
