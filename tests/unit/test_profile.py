"""Pure tests of profiles: data, tiers, tables, refusals."""

import dataclasses
import json
import re

import numpy as np
import pytest

from megatron_nsp.cli import main
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import (
    ExchangeRate,
    Profile,
    built_in_profiles,
    load_profile,
    measured_tiers,
)
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.simulator.sharding import sharding_us

H100 = load_profile("h100-ib")


def test_built_in_profiles_say_that_they_are_estimates() -> None:
    assert {"cpu-gloo", "h100-ib", "h200-ib", "b200-ib"} < set(built_in_profiles())
    for name in built_in_profiles():
        profile = load_profile(name)
        assert profile.name == name and profile.is_estimate
        assert re.search("estimate|published", profile.provenance) and len(profile.date) == 10


def test_h100_ib_sends_across_hosts_what_leaves_them() -> None:
    for is_fwd in (True, False):
        assert H100.attention_flops_per_s(np.array([1, 10**6]), is_fwd).tolist() == [450e12] * 2
    assert (H100.dense_flops_per_s, H100.latency_us) == (380e12, 30)
    rates = [H100.exchange_rate("ulysses", d).bytes_per_s for d in (2, 8, 16, 32, 64)]
    assert rates == [350e9, 350e9, 45e9 * 15 / 8, 45e9 * 31 / 24, 45e9 * 63 / 56]


def test_a_measured_table_goes_before_the_tiers() -> None:
    rate = ExchangeRate(123e9, 7.0)
    measured = dataclasses.replace(H100, exchanges={"ulysses": {4: rate}})
    assert measured.exchange_rate("ulysses", 4) == rate
    assert measured.exchange_rate("ring", 4).bytes_per_s == 350e9
    assert measured.exchange_rate("ulysses", 8) == ExchangeRate(350e9, 30.0)
    again = Profile.from_dict(json.loads(json.dumps(measured.to_dict())))
    assert again == measured and len({again, measured, H100}) == 2


def test_a_profile_from_a_file(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**H100.to_dict(), "name": "mine"}))
    assert load_profile(str(path)) == dataclasses.replace(H100, name="mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense_flops_per_s": 0}, "dense_flops_per_s must be positive and finite, got 0"),
        (
            {"dense_flops_per_s": float("nan")},
            "dense_flops_per_s must be positive and finite, got nan",
        ),
        ({"latency_us": -1}, "latency_us must be at least 0 and finite, got -1"),
        (
            {"exchanges": {"ulysses": {"1": {}}}},
            "exchanges.ulysses is by whole numbers from 2",
        ),
        ({"exchanges": {"ulysses": {"x": {}}}}, "is by whole numbers from 2, got x"),
        ({"exchanges": {"ulysses": [5]}}, r"exchanges.ulysses must be a JSON object, got \[5\]"),
        ({"exchanges": {"ulysses": {"2": {}}}}, "ulysses.2.bytes_per_s, latency_us is missing"),
        ({"attention": {}}, "attention must hold at least one length"),
        ({"attention": {"1": {"fwd_flops_per_s": 0}}}, "attention.1.bwd_flops_per_s is missing"),
        ({"fitted": {"quadratic_us": 1}}, "the field fitted.linear_us, .* is missing"),
        ({"is_estimate": "yes"}, "is_estimate must be true or false, got 'yes'"),
        ({"name": 3}, "name must be text, got 3"),
        ({"memory_bytes": -1}, "memory_bytes must be positive and finite, got -1"),
        ({"ranks_per_host": True}, "ranks_per_host must be a number, got True"),
        ({"speed": 3}, "there is no field speed"),
        ({"dense_flops_per_s": "fast"}, "dense_flops_per_s must be a number, got 'fast'"),
        (
            {"dense_flops_per_s": float("inf")},
            "dense_flops_per_s must be positive and finite, got inf",
        ),
    ],
)
def test_impossible_profiles_are_refused(tmp_path, change: dict, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**H100.to_dict(), **change}))
    with pytest.raises(ValueError, match=message) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)


def test_files_that_are_no_profiles(tmp_path) -> None:
    with pytest.raises(ValueError, match="neither a file of text nor one of a100"):
        load_profile("h300")
    for text, message in (
        ("{", r"profile .*bad\.json is not JSON: Expecting property name"),
        ("[]", r"bad\.json: a profile must be a JSON object, got \[\]"),
        ("{}", "the field name, is_estimate, .* is missing"),
    ):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_profile(str(path))


# --- what was not measured ------------------------------------------------------------------------

ABSENT = "profile one has no {}: no exchange {} was measured (ranks_per_host 8); profile more ranks"
INSIDE = ABSENT.format("intra_bytes_per_s", "inside a host")
BETWEEN = ABSENT.format("inter_bytes_per_s", "between hosts")
QWEN3 = known_model("qwen3-30b-a3b")


def unmeasured(**rates: float | None) -> Profile:
    """h100-ib without both rates but for those given."""
    absent = {"intra_bytes_per_s": None, "inter_bytes_per_s": None}
    return dataclasses.replace(H100, name="one", **(absent | rates))


def test_a_profile_without_rates_of_exchanges_plans_degree_1() -> None:
    profile = unmeasured()
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    tree = SPTree(8, (1,))
    plans = [
        plan_batch([900, 300, 5], tree, CostModel(given, QWEN3.shape(), tree)).plan
        for given in (profile, H100)
    ]
    assert plans[0] == plans[1] and plans[0].token_load().tolist().count(0) == 5


@pytest.mark.parametrize("backend", ["ulysses", "ring", "usp", "gather", "auto"])
@pytest.mark.parametrize(
    ("rates", "num_ranks", "message"),
    [
        ({}, 2, INSIDE),
        ({"inter_bytes_per_s": 1e9}, 8, INSIDE),
        ({"intra_bytes_per_s": 1e9}, 16, BETWEEN),
    ],
)
def test_exchanges_that_were_not_measured_are_refused_before_planning(
    backend: str, rates: dict, num_ranks: int, message: str
) -> None:
    degrees = (1, 2) if num_ranks == 2 else (1, num_ranks)
    with pytest.raises(ValueError, match=re.escape(message)):
        CostModel(unmeasured(**rates), QWEN3.shape(), SPTree(num_ranks, degrees), backend=backend)


@pytest.mark.parametrize("backend", ["ulysses", "ring", "usp", "gather", "auto"])
def test_one_host_that_was_measured_is_enough_for_nodes_inside_hosts(backend: str) -> None:
    profile, tree = unmeasured(intra_bytes_per_s=350e9), SPTree(16, (1, 2, 4, 8))
    lengths = np.array([9000, 50])
    times = [
        CostModel(given, QWEN3.shape(), tree, backend=backend).sample_times(lengths)
        for given in (profile, H100)
    ]
    assert np.array_equal(times[0].fwd_us, times[1].fwd_us)


def test_experts_and_shards_need_rates_too() -> None:
    with pytest.raises(ValueError, match=re.escape(INSIDE)):
        CostModel(unmeasured(), QWEN3.shape(expert_parallel=4), SPTree(8, (1,)))
    with pytest.raises(ValueError, match=re.escape(INSIDE)):
        sharding_us(QWEN3, unmeasured(), 8)
    with pytest.raises(ValueError, match=re.escape(BETWEEN)):
        sharding_us(QWEN3, unmeasured(intra_bytes_per_s=350e9), 16)
    inside = [sharding_us(QWEN3, given, 8) for given in (unmeasured(intra_bytes_per_s=350e9), H100)]
    assert inside[0] == inside[1] != (0.0, 0.0)
    assert sharding_us(QWEN3, unmeasured(), 1) == (0.0, 0.0)


def test_the_command_says_it_in_one_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(unmeasured().to_dict()))
    words = f"plan --lengths 900,30 --ranks 8 --profile {path} --max-degree"
    assert main([*words.split(), "1"]) == 0
    capsys.readouterr()
    assert main([*words.split(), "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert INSIDE in line


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4, 8, 12])
def test_tiers_are_found_again_in_the_rates_that_follow_from_them(ranks_per_host: int) -> None:
    known = dataclasses.replace(H100, ranks_per_host=ranks_per_host)
    rates = {d: known.exchange_rate("ulysses", d).bytes_per_s for d in (2, 4, 8, 16, 32)}
    inside, between = measured_tiers(rates, ranks_per_host)
    assert inside == (None if ranks_per_host == 1 else 350e9)
    assert between == pytest.approx(45e9)
    alone = {degree: rates[degree] for degree in (2, 4) if ranks_per_host % degree == 0}
    assert measured_tiers(alone, ranks_per_host)[1] is None
