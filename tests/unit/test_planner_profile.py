"""Pure tests of profiles: data, tiers, tables, refusals."""

import dataclasses
import json

import pytest

from megatron_nsp.planner.profile import Profile, built_in_profiles, load_profile

H100 = load_profile("h100-ib")


def test_built_in_profiles_say_that_they_are_estimates() -> None:
    assert built_in_profiles() == ("cpu-gloo", "h100-ib")
    for name in built_in_profiles():
        profile = load_profile(name)
        assert profile.name == name and profile.is_estimate
        assert "estimate" in profile.provenance and len(profile.date) == 10


def test_h100_ib_is_what_the_issue_states() -> None:
    assert (H100.attention_flops_per_s, H100.dense_flops_per_s) == (450e12, 380e12)
    assert H100.latency_us == 30
    rates = [H100.all_to_all_rate_bytes_per_s(d) for d in (2, 8, 16, 32, 64)]
    assert rates == [350e9, 350e9, 45e9 * 16 / 8, 45e9 * 32 / 24, 45e9 * 64 / 56]


def test_a_measured_table_goes_before_the_tiers() -> None:
    measured = dataclasses.replace(H100, all_to_all_bytes_per_s={4: 123e9})
    assert measured.all_to_all_rate_bytes_per_s(4) == 123e9
    assert measured.all_to_all_rate_bytes_per_s(8) == 350e9
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
        ({"all_to_all_bytes_per_s": {"1": 5}}, "at degree 1"),
        ({"speed": 3}, "no field speed"),
        ({"dense_flops_per_s": "fast"}, "dense_flops_per_s must be a number, got 'fast'"),
        ({"dense_flops_per_s": float("inf")}, "dense_flops_per_s must be positive and finite"),
        ({"all_to_all_bytes_per_s": [1, 2]}, r"must map degrees to rates, got \[1, 2\]"),
        ({"all_to_all_bytes_per_s": {"2": "x"}}, "must map degrees to rates"),
    ],
)
def test_impossible_profiles_are_refused(tmp_path, change: dict, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**H100.to_dict(), **change}))
    with pytest.raises(ValueError, match=message) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)


def test_files_that_are_no_profiles(tmp_path) -> None:
    with pytest.raises(ValueError, match="neither a file nor one of cpu-gloo, h100-ib"):
        load_profile("h200")
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "needs the field"),
    ):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_profile(str(path))
