"""Pure tests of profiles: data, tiers, tables, refusals."""

import dataclasses
import json
import re

import numpy as np
import pytest

from megatron_nsp.cost.profile import ExchangeRate, Profile, built_in_profiles, load_profile

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
    assert Profile.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    assert hash(measured) is not None


def test_a_profile_from_a_file(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**H100.to_dict(), "name": "mine"}))
    assert load_profile(str(path)) == dataclasses.replace(H100, name="mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense_flops_per_s": 0}, "dense_flops_per_s must be positive and finite, got 0"),
        ({"dense_flops_per_s": float("nan")}, "dense_flops_per_s must be positive"),
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
        ({"dense_flops_per_s": float("inf")}, "dense_flops_per_s must be positive and finite"),
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
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "the field name, is_estimate, .* is missing"),
    ):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_profile(str(path))
