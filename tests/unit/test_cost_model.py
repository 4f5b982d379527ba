"""Pure tests of the cost model: bytes, phases, and whole plans against the independent scorer.

Cases B2, C1.
"""

import dataclasses
import random

import numpy as np
import pytest

from megatron_nsp.config import NSPConfig, build_tree
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.node_cost import SplitCost, sent_bytes_per_token, ulysses_sent_bytes
from megatron_nsp.cost.profile import AttentionRate, ExchangeRate, load_profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.backends import backend_choices
from megatron_nsp.plan.heads import HeadShape
from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.schedule import build_schedule
from megatron_nsp.plan.split import Split, slice_bounds
from megatron_nsp.plan.traffic import sent_elements
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.planner import plan_batch, policy_names
from megatron_nsp.testing.random_plans import random_lengths, random_plan, random_splits
from megatron_nsp.testing.scorer import score_plan
from tests.unit.planner_cases import LARGE, SMALL, cluster, workstation


def constants(cost: CostModel) -> dict:
    from megatron_nsp.cli.plan import report  # the JSON a user would hand to the scorer
    from megatron_nsp.steps.lengths import DrawnLengths

    result = plan_batch([1], cost.tree, cost)
    return report(result, cost, DrawnLengths(np.array([1]), 0, 0))["profile"]


@pytest.mark.parametrize("cost", [cluster(16, 16), workstation(12, (1, 3, 6, 12))])
def test_plans_score_as_the_formulas_say(cost: CostModel) -> None:
    rng, profile, heads = random.Random(0), constants(cost), cost.shape
    backends = set()
    for number in range(80):
        plan = random_plan(rng, cost.tree, random_lengths(rng, 12, 50_000))
        if number % 2:
            plan = random_splits(rng, plan, heads.num_heads, heads.num_kv_heads)
        backends |= {split.label(cost.tree.degree(n)) for (_, n), split in plan.splits.items()}
        score, expected = cost.score(plan), score_plan(plan.to_dict(), profile)
        assert score.load_us == pytest.approx(expected.load_us, rel=1e-12)
        assert score.load_no_latency_us == pytest.approx(expected.load_no_latency_us, rel=1e-12)
        assert score.rank_load_us.tolist() == pytest.approx(expected.rank_load_us, rel=1e-12)
    assert backends == {"ring", "usp", "gather"}


def test_several_micro_batches_add_up_and_fillers_pay_the_bias() -> None:
    cost = workstation(4, (1, 2, 4))
    result = plan_batch([4000] * 3, cost.tree, cost, token_budget=2000, num_micro_batches=5)
    expected = score_plan(result.plan.to_dict(), constants(cost))
    assert result.report.num_micro_batches_used == 2
    assert result.report.load_us == pytest.approx(expected.load_us, rel=1e-12)
    one = plan_batch([4000] * 3, cost.tree, cost, token_budget=2000, num_micro_batches=2)
    assert result.report.load_us - one.report.load_us == pytest.approx(3 * cost.profile.bias_us)


def test_what_a_node_sends_is_what_its_members_lack() -> None:
    """Ulysses turns T tokens of all heads into S tokens of H/d heads: count both ends."""
    for degree, stream in ((2, 7), (4, 9), (8, 8), (8, 1001)):
        tokens = np.diff(slice_bounds(stream, degree)).tolist()
        sent = {
            (pass_, phase): sum(
                ulysses_sent_bytes(pass_, phase, held, stream, degree, LARGE) for held in tokens
            )
            for pass_ in Pass
            for phase in Phase
        }
        assert all(isinstance(value, int) for value in sent.values())
        heads, kv_heads = 32 // degree, max(4 // degree, 1)
        lacked = sum(stream - held for held in tokens) * 128 * 2
        assert sent[Pass.FWD, Phase.PROLOGUE] == lacked * (heads + 2 * kv_heads)
        assert sent[Pass.FWD, Phase.EPILOGUE] == lacked * heads
        assert sent[Pass.BWD, Phase.PROLOGUE] == lacked * heads
        assert sent[Pass.BWD, Phase.EPILOGUE] == lacked * (heads + 2 * kv_heads)
        assert sent[Pass.FWD, Phase.COMPUTE] == sent[Pass.BWD, Phase.COMPUTE] == 0


def test_c1_predictions_are_the_same_on_all_members_of_a_node() -> None:
    cost = workstation(4, (1, 2, 4))
    plan = random_plan(random.Random(3), cost.tree, [7, 5, 3])
    for degree in (2, 4):
        node = cost.tree.node(degree, 0)
        plan = type(plan).from_nodes(cost.tree, [7, 5, 3], [node] * 3)
        score = cost.score(plan)
        ranks = list(cost.tree.ranks(node))
        assert len(set(score.fwd_us[0, ranks].tolist())) == 1
        assert len(set(score.bwd_us[0, ranks].tolist())) == 1
        assert plan.token_load().sum() == 15


@pytest.mark.parametrize("backend", backend_choices())
@pytest.mark.parametrize("heads", [(28, 7), (12, 12), (5, 5), (8, 2)])
def test_b2_no_plan_splits_heads_that_do_not_divide(backend: str, heads: tuple[int, int]) -> None:
    config, shape = NSPConfig(backend=backend), ModelShape.from_hidden(4, 64, *heads, 16)
    tree = build_tree(config, 16, *heads)
    expected = {(28, 7): 1, (12, 12): 4, (5, 5): 1, (8, 2): 8}[heads]
    if backend == "te-a2a":  # gives no key/value head to two ranks
        expected = min(expected, heads[1])
    assert tree.max_degree == (expected if backend in ("ulysses", "te-a2a") else 16)
    cost = CostModel(load_profile("h100-ib"), shape, tree, backend)
    for policy in ("auto", "search", "root", "static-4", "two-level", "disjoint-lpt"):
        if policy not in policy_names(tree):
            continue
        plan = plan_batch([90_000, 40_000, 5000, 5], tree, cost, policy=policy).plan
        plan.check_heads(*heads)
        found = {plan.split_of(node).label(tree.degree(node)) for node in plan.active_nodes()}
        assert backend == "auto" or found <= {backend, "ulysses", "ring"}
        if backend == "ring":
            assert all(plan.split_of(n).num_members == tree.degree(n) for n in plan.active_nodes())
    with pytest.raises(ValueError, match="degree 2 cannot split 28 query and 7 key/value heads"):
        CostModel(
            load_profile("h100-ib"),
            dataclasses.replace(shape, num_heads=28, num_kv_heads=7),
            SPTree(8, (1, 2, 4, 8)),
        )


def test_bytes_are_those_of_the_closed_form_of_every_backend() -> None:
    """The busiest rank's exact bytes, where chunks come out even; close to them where not."""
    rng, kinds = random.Random(5), set()
    shape = dataclasses.replace(SMALL, num_heads=8, num_kv_heads=4)
    heads = HeadShape(8, 4, shape.head_dim, shape.head_dim)
    for number in range(120):
        degree = rng.choice((2, 4, 8))
        tree, is_even = SPTree(degree, (1, degree)), number % 2 == 0
        lengths = [rng.randint(1, 40) * (16 * degree if is_even else 1) for _ in range(5)]
        plan = Plan.from_nodes(tree, lengths, [Node(0, 0)] * 5)
        plan = random_splits(rng, plan, 8, 4)
        split = plan.split_of(Node(0, 0))
        kinds.add(split.label(degree))
        parts = [rank_layout(plan, rank).slices[0] for rank in range(degree)]
        for pass_ in Pass:
            for step in build_schedule([Node(0, 0)], pass_, True, {Node(0, 0): split}):
                exact = max(sent_elements(step, part, heads) for part in parts)
                exact *= shape.bytes_per_element
                each = sent_bytes_per_token(pass_, step.phase, step.round, degree, split, shape)
                if is_even:
                    assert each * sum(lengths) == exact, (split, step)
                else:  # every sample's chunks, and the slices of a stream, round by a token each
                    assert abs(each * sum(lengths) - exact) <= each * degree * 11
    assert kinds == {"ulysses", "ring", "usp", "gather"}


def test_degree_one_is_alone_and_cheap() -> None:
    cost = cluster(8, 8)
    for pass_ in Pass:
        assert cost.of(1).exchange_us_per_token(pass_, Phase.PROLOGUE) == 0
        assert cost.of(1).exchange_us_per_token(pass_, Phase.EPILOGUE) == 0
    lengths = np.array([10, 1000])
    latency_us = cost.sample_times(lengths).latency_us
    assert latency_us.tolist() == [48 * 30.0, *[3 * 48 * 30.0] * 3]
    assert cost.dense_us_per_token(Pass.BWD) == 2 * cost.dense_us_per_token(Pass.FWD)
    how = cost.of(4)
    assert (how.round_us(lengths, Pass.BWD) == 2.5 * how.round_us(lengths, Pass.FWD)).all()


def test_rates_between_two_lengths_lie_between_and_plans_score_with_them() -> None:
    rates = {100: AttentionRate(1e9, 2e9), 300: AttentionRate(3e9, 1e9)}
    profile = dataclasses.replace(
        load_profile("cpu-gloo"),
        attention=rates,
        exchanges={"ulysses": {2: ExchangeRate(1e8, 900.0)}},
    )
    lengths = np.array([1, 100, 150, 300, 1000])
    assert profile.attention_flops_per_s(lengths, True).tolist() == [1e9, 1e9, 1.5e9, 3e9, 3e9]
    assert profile.attention_flops_per_s(lengths, False).tolist() == [2e9, 2e9, 1.75e9, 1e9, 1e9]
    experts = dataclasses.replace(
        SMALL,
        expert_degree=4,
        expert_flops_per_token=SMALL.dense_flops_per_token / 2,
        expert_bytes_per_token=99.0,
        output_flops_per_token=5e5,
    )
    cost = CostModel(profile, experts, SPTree(4, (1, 2, 4)))
    for recompute, share in (("selective", 1.0), ("full", 1.0), ("selective", 0.5), ("full", 0.25)):
        again = dataclasses.replace(cost, recompute=recompute, recompute_share=share)
        plan = random_plan(random.Random(2), cost.tree, [70, 500, 120, 3000])
        expected = score_plan(plan.to_dict(), constants(again))
        assert again.score(plan).load_us == pytest.approx(expected.load_us, rel=1e-12)
    latency_us = cost.sample_times(lengths).latency_us
    assert latency_us.tolist() == [2 * 400.0, 2 * (400 + 2 * 900.0), 2 * 3 * 400.0]
    plan = random_plan(random.Random(1), cost.tree, [7, 500, 120, 3000])
    expected = score_plan(plan.to_dict(), constants(cost))
    assert cost.score(plan).load_us == pytest.approx(expected.load_us, rel=1e-12)


@pytest.mark.parametrize(
    ("degree", "stride", "rate"),
    [
        (8, 1, 350e9),
        (3, 1, 45e9),  # ranks 6, 7 and 8 meet across hosts
        (4, 2, 350e9),
        (8, 2, 45e9 * 7 / 4),
        (2, 16, 45e9),
    ],
)
def test_hosts_and_strides_decide_what_crosses_the_network(
    degree: int, stride: int, rate: float
) -> None:
    profile = load_profile("h100-ib")
    assert profile.exchange_rate("ulysses", degree, stride).bytes_per_s == rate


def test_impossible_models_are_refused() -> None:
    with pytest.raises(ValueError, match="7 query heads do not divide over 2"):
        ModelShape.from_hidden(2, 64, 7, 2, 8)
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        ModelShape.from_hidden(0, 64, 8, 2, 8)
    with pytest.raises(ValueError, match="no SP backend rings, only auto, ulysses, ring, usp, ga"):
        CostModel(load_profile("cpu-gloo"), SMALL, SPTree(2, (1, 2)), backend="rings")
    fitted = load_profile("flexsp-gpt-7b-a100")
    with pytest.raises(ValueError, match=r"holds the times of one model with Ulysses, not"):
        CostModel(fitted, SMALL, SPTree(2, (1, 2)), backend="usp")


def test_values_of_another_head_dim_and_windows_cost_what_they_are() -> None:
    plain = cluster(8, 8)
    half = dataclasses.replace(plain.shape, value_dim=plain.shape.head_dim // 2)
    lengths, degree = np.array([1, 5, 6, 7, 1000]), 4
    whole, narrow = (
        SplitCost(plain.profile, shape, degree).round_us(lengths, Pass.FWD)
        for shape in (plain.shape, half)
    )
    np.testing.assert_allclose(narrow, 0.75 * whole, rtol=1e-12)
    sent = {
        (shape.value_dim, phase): ulysses_sent_bytes(Pass.FWD, phase, 10, 40, degree, shape)
        for shape in (plain.shape, half)
        for phase in Phase
    }
    assert sent[64, Phase.EPILOGUE] * 2 == sent[128, Phase.EPILOGUE]
    assert sent[128, Phase.PROLOGUE] - sent[64, Phase.PROLOGUE] == 10 * 3 * 1 * 64 * 2  # v of one

    window = dataclasses.replace(plain.shape, num_windowed_layers=36, window_left=5)  # of 48
    pairs = [sum(min(t + 1, 6) for t in range(length)) for length in lengths.tolist()]
    for number, share in ((0, 1.0), (1, 0.25)):  # members send for the 12 other layers alone
        whole_us, window_us = (
            SplitCost(plain.profile, shape, 4, Split(2)).exchange_us_per_token(
                Pass.FWD, Phase.PROLOGUE, number
            )
            for shape in (plain.shape, window)
        )
        assert window_us == pytest.approx(share * whole_us, rel=1e-12) and whole_us > 0
    # A whole triangle counts as L^2 / 2: what is on the diagonal is left out, in a window too.
    assert window.square_tokens(lengths * 1.0).tolist() == [
        0.25 * length**2 + 0.75 * (2 * pair - min(length, 6))
        for length, pair in zip(lengths.tolist(), pairs, strict=True)
    ]
