"""Pure tests of the search: against brute force, against every policy, and on plain cases."""

import numpy as np
import pytest

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.testing.scorer import score_plan
from tests.unit.planner_cases import (
    LARGE,
    LARGE_12,
    brute_force_us,
    cluster,
    drawn,
    ready_policies,
    workstation,
)
from tests.unit.test_cost_model import constants


def test_tiny_trees_are_planned_nearly_as_well_as_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    h100 = load_profile("h100-ib")
    tiny = [
        (cluster(4, 4), 5, 200_000),
        (workstation(4, (1, 2, 4)), 5, 4_000),
        (CostModel(h100, LARGE_12, SPTree(6, (1, 3, 6))), 4, 200_000),
        (CostModel(h100, LARGE, SPTree(8, (1, 2, 4))), 4, 200_000),
        (workstation(2, (1, 2)), 7, 4_000),
    ]
    excess = []
    for cost, num_samples, longest in tiny * 8:
        lengths = np.exp(rng.uniform(np.log(100), np.log(longest), num_samples)).astype(int)
        best_us = brute_force_us(cost.sample_times(lengths)) + cost.profile.bias_us
        report = plan_batch(lengths, cost.tree, cost).report
        assert report.load_us >= best_us * (1 - 1e-12)
        assert report.load_us <= min(report.search_load_us, *report.policies.values())
        excess.append(report.search_load_us / best_us - 1)
    assert np.mean(np.array(excess) <= 0.01) >= 0.95
    assert np.mean(excess) < 0.002


@pytest.mark.parametrize("name", ["wikipedia", "source-code", "paper-mix"])
def test_the_search_alone_beats_every_policy_in_the_independent_score(name: str) -> None:
    cost = cluster()
    profile, gaps = constants(cost), []
    for seed, longest in ((0, 196608), (1, 393216)):
        lengths = drawn(name, seed, longest=longest)
        by_policy = {}
        for policy in ready_policies(cost.tree):
            result = plan_batch(lengths, cost.tree, cost, policy=policy)
            by_policy[policy] = score_plan(result.plan.to_dict(), profile).load_us
            assert result.report.load_us == pytest.approx(by_policy[policy], rel=1e-12)
            if policy == "auto":
                gaps.append(result.report.gap_no_latency)
        assert by_policy["auto"] <= by_policy["search"] == min(by_policy.values())
    assert max(gaps) <= 1.02


@pytest.mark.parametrize("num_samples", [1, 2, 4, 8, 16, 24])
def test_equal_samples_are_placed_as_basp_places_them(num_samples: int) -> None:
    """B equal samples, N ranks: one node of N / B contiguous ranks each; more: data parallel."""
    cost = cluster(8, 8)
    plan = plan_batch([60_000] * num_samples, cost.tree, cost, policy="search").plan
    degree = max(8 // num_samples, 1)
    nodes = [plan.node_of(j) for j in range(num_samples)]
    assert {cost.tree.degree(node) for node in nodes} == {degree}
    per_node = np.bincount([node.index for node in nodes])
    assert set(per_node.tolist()) == {max(num_samples // 8, 1)}


def test_one_long_sample_does_not_make_others_wait() -> None:
    """A step as long as its longest sample at the largest degree, and not a launch longer."""
    cost = cluster()
    lengths = [380_000, *[1000] * 200]
    report = plan_batch(lengths, cost.tree, cost, policy="search").report
    alone = plan_batch(lengths[:1], cost.tree, cost, policy="root").report
    assert report.load_us == alone.load_us
    assert report.gap_no_latency == pytest.approx(1, abs=1e-12)


def test_latency_keeps_short_samples_off_nodes_that_need_an_exchange() -> None:
    cost = cluster(8, 8)
    plan = plan_batch([8, 7, 6, 5, 4, 3, 2, 1, 1], cost.tree, cost).plan
    assert {cost.tree.degree(node) for node in plan.active_nodes()} == {1}


@pytest.mark.parametrize(
    ("num_ranks", "degrees"),
    [(12, (1, 3, 6, 12)), (12, (1, 2, 4)), (5, (1,)), (1, (1,)), (7, (1, 7))],
)
@pytest.mark.parametrize("lengths", [[], [1], [1] * 40, [5000], [5000, 1], [900] * 5, [3, 2, 9000]])
def test_any_chain_and_any_batch_is_planned(num_ranks, degrees, lengths) -> None:
    shape = LARGE_12 if 7 not in degrees else type(LARGE).from_hidden(2, 64, 28, 7, 16)
    tree = SPTree(num_ranks, degrees)
    cost = CostModel(load_profile("cpu-gloo"), shape, tree)
    for policy in ready_policies(tree):
        result = plan_batch(lengths, tree, cost, policy=policy)
        result.plan.validate()
        assert result.plan.num_samples == len(lengths) and not len(result.plan.carried)
        assert result.report.gap >= result.report.gap_no_latency >= 1 - 1e-12


def test_named_policies_do_what_their_name_says() -> None:
    cost = cluster(8, 8)
    lengths = drawn("paper-mix", 0, 100_000, 40_000)

    def degrees(policy: str) -> set[int]:
        plan = plan_batch(lengths, cost.tree, cost, policy=policy).plan
        return {cost.tree.degree(node) for node in plan.active_nodes()}

    assert degrees("leaves") == degrees("static-1") == {1}
    assert degrees("root") == degrees("static-8") == {8}
    assert degrees("static-4") == {4}
    assert degrees("two-level") <= {1, 8}
    plan = plan_batch(lengths, cost.tree, cost, policy="disjoint-lpt").plan
    assert all(len(plan.active_path(rank)) <= 1 for rank in range(8))
    with pytest.raises(ValueError, match="no policy static-16, only auto, search, static-1"):
        plan_batch(lengths, cost.tree, cost, policy="static-16")
