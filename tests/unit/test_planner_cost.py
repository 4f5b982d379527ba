"""Pure tests of the cost model: bytes, phases, and whole plans against the independent scorer.

Cases B2, C1.
"""

import dataclasses
import random

import numpy as np
import pytest

from megatron_nsp.config import NSPConfig, build_tree, is_admissible
from megatron_nsp.planner import CostModel, ModelShape, load_profile, plan_batch
from megatron_nsp.planner.cost import SENT_BYTES, ulysses_sent_bytes
from megatron_nsp.planner.profile import AttentionRate, ExchangeRate
from megatron_nsp.schedule import Pass, Phase
from megatron_nsp.split import slice_bounds
from megatron_nsp.testing.random_plans import random_lengths, random_plan
from megatron_nsp.tree import SPTree
from tests.unit.planner_cases import LARGE, SMALL, cluster, workstation
from tests.unit.scorer import score_plan


def constants(cost: CostModel) -> dict:
    from megatron_nsp.cli.plan import report  # the JSON a user would hand to the scorer
    from megatron_nsp.planner.lengths import Batch

    result = plan_batch([1], cost.tree, cost)
    return report(result, cost, Batch(np.array([1]), 0, 0))["profile"]


@pytest.mark.parametrize("cost", [cluster(16, 8), workstation(12, (1, 3, 6, 12))])
def test_plans_score_as_the_formulas_say(cost: CostModel) -> None:
    rng, profile = random.Random(0), constants(cost)
    for _ in range(40):
        plan = random_plan(rng, cost.tree, random_lengths(rng, 12, 50_000))
        score, expected = cost.score(plan), score_plan(plan.to_dict(), profile)
        assert score.load_us == pytest.approx(expected.load_us, rel=1e-12)
        assert score.load_no_latency_us == pytest.approx(expected.load_no_latency_us, rel=1e-12)
        assert score.rank_load_us.tolist() == pytest.approx(expected.rank_load_us, rel=1e-12)


def test_several_micro_batches_add_up_and_fillers_pay_the_bias() -> None:
    cost = workstation(4, (1, 2, 4))
    result = plan_batch([4000] * 3, cost.tree, cost, token_budget=2000, num_micro_batches=5)
    expected = score_plan(result.plan.to_dict(), constants(cost))
    assert result.report.num_passes == 2
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


def test_b2_inadmissible_degrees_are_never_offered() -> None:
    profile = load_profile("h100-ib")
    shapes = [ModelShape.from_hidden(4, 64, *heads, 16) for heads in ((28, 7), (12, 12), (28, 7))]
    for shape in shapes:
        tree = build_tree(NSPConfig(), 8, shape.num_heads, shape.num_kv_heads)
        assert all(is_admissible(d, shape.num_heads, shape.num_kv_heads) for d in tree.degrees)
        plan = plan_batch([90_000, 40_000, 5], tree, CostModel(profile, shape, tree)).plan
        assert {tree.degree(plan.node_of(j)) for j in range(3)} <= set(tree.degrees)
    with pytest.raises(ValueError, match="degree 2 cannot split 28 query and 7 key/value heads"):
        CostModel(profile, shapes[0], SPTree(8, (1, 2, 4, 8)))


def test_degree_one_is_alone_and_cheap() -> None:
    cost = cluster(8, 8)
    for pass_ in Pass:
        assert cost.exchange_us_per_token(pass_, Phase.PROLOGUE)[0] == 0
        assert cost.exchange_us_per_token(pass_, Phase.EPILOGUE)[0] == 0
    assert cost.node_latency_us.tolist() == [48 * 30.0, *[3 * 48 * 30.0] * 3]
    assert cost.dense_us_per_token(Pass.BWD) == 2 * cost.dense_us_per_token(Pass.FWD)
    lengths = np.array([10, 1000])
    assert (cost.compute_us(lengths, Pass.BWD) == 2.5 * cost.compute_us(lengths, Pass.FWD)).all()
    assert set(SENT_BYTES) == {"ulysses"}


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
    for recompute in ("attention", "full"):
        again = dataclasses.replace(cost, recompute=recompute)
        plan = random_plan(random.Random(2), cost.tree, [70, 500, 120, 3000])
        expected = score_plan(plan.to_dict(), constants(again))
        assert again.score(plan).load_us == pytest.approx(expected.load_us, rel=1e-12)
    assert cost.node_latency_us.tolist() == [2 * 400.0, 2 * (400 + 2 * 900.0), 2 * 3 * 400.0]
    plan = random_plan(random.Random(1), cost.tree, [7, 500, 120, 3000])
    expected = score_plan(plan.to_dict(), constants(cost))
    assert cost.score(plan).load_us == pytest.approx(expected.load_us, rel=1e-12)


@pytest.mark.parametrize(
    ("degree", "stride", "rate"),
    [
        (8, 1, 350e9),
        (3, 1, 45e9 * 3 / 2),  # ranks 6, 7 and 8 meet across hosts
        (4, 2, 350e9),
        (8, 2, 45e9 * 8 / 4),
        (2, 16, 45e9 * 2 / 1),
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
    with pytest.raises(ValueError, match="no SP backend ring, only ulysses"):
        CostModel(load_profile("cpu-gloo"), SMALL, SPTree(2, (1, 2)), backend="ring")


def test_values_of_another_head_dim_and_windows_cost_what_they_are() -> None:
    plain = cluster(8, 8)
    half = dataclasses.replace(plain.shape, value_dim=plain.shape.head_dim // 2)
    lengths, degree = np.array([1, 5, 6, 7, 1000]), 4
    narrow = dataclasses.replace(plain, shape=half).compute_us(lengths, Pass.FWD)
    np.testing.assert_allclose(narrow, 0.75 * plain.compute_us(lengths, Pass.FWD), rtol=1e-12)
    sent = {
        (shape.value_dim, phase): ulysses_sent_bytes(Pass.FWD, phase, 10, 40, degree, shape)
        for shape in (plain.shape, half)
        for phase in Phase
    }
    assert sent[64, Phase.EPILOGUE] * 2 == sent[128, Phase.EPILOGUE]
    assert sent[128, Phase.PROLOGUE] - sent[64, Phase.PROLOGUE] == 10 * 3 * 1 * 64 * 2  # v of one

    window = dataclasses.replace(plain.shape, num_windowed_layers=36, window_left=5)  # of 48
    pairs = [sum(min(t + 1, 6) for t in range(length)) for length in lengths.tolist()]
    # A whole triangle counts as L^2 / 2: what is on the diagonal is left out, in a window too.
    assert window.square_tokens(lengths * 1.0).tolist() == [
        0.25 * length**2 + 0.75 * (2 * pair - min(length, 6))
        for length, pair in zip(lengths.tolist(), pairs, strict=True)
    ]
