"""`megatron-nsp verify` as a user calls it."""

import json

import pytest

from megatron_nsp.cli import main
from megatron_nsp.testing import verify

FORCED = "verify --ranks 4 --lengths 100,7,1 --nodes 4:0,2:1,1:3 --heads 8 --kv-heads 2"


def test_a_right_plan_exits_zero_and_reports_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FORCED.split(), "--head-dim", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["errors"]) == {"out", "dq", "dk", "dv"}
    assert max(report["errors"].values()) < 1e-12
    assert report["collectives"] == report["predicted_collectives"] == [4, 4, 8, 8]
    assert report["sent_bytes"] == report["predicted_bytes"] and min(report["sent_bytes"]) > 0


def test_a_chain_by_name_without_overlap_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "verify --ranks 6 --degrees 1,3,6 --lengths 50,20,7 --nodes 6:0,3:1,1:2 --heads 12"
    assert main([*flags.split(), "--kv-heads", "3", "--head-dim", "8", "--no-overlap"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "right" and len(lines) == 1 + 4 + 1 + 6 + 1


@pytest.mark.parametrize(
    "flags",
    [
        "--heads 5 --kv-heads 5 --backend ring --sinks",
        "--backend usp --value-dim 4 --full-mask",
        "--heads 5 --kv-heads 5 --backend gather --window 20",
        "--backend gather --ring-degree 4",
    ],
)
def test_every_backend_and_mask(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    assert main([*FORCED.split(), "--head-dim", "8", *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "right" and any("dsink" in line for line in lines) == ("--sinks" in flags)


def test_errors_above_the_tolerance_exit_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(verify.TOLERANCE, "float64", 1e-20)
    assert main([*FORCED.split(), "--head-dim", "8"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "WRONG"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--nodes 4:0,2:1", "--nodes names 2 nodes for 3 --lengths"),
        ("--nodes 4:0,2:1,1:9", "node 1:9 does not exist: 4 ranks hold 4 nodes of degree 1"),
        ("--nodes 4:0,2:1,3:0", "degree 3 is not in the chain"),
        ("--nodes 4:0,2:1,x", "--nodes takes degree:index divided by commas, got 'x'"),
        ("--lengths 100,7,0", "sample 2 has 0 tokens, at least 1 needed"),
        ("--lengths 100,7,a", "--lengths takes whole numbers divided by commas"),
        ("--heads 6", "node 4:0 cannot split 6 query and 2 key/value heads over 4 ranks evenly"),
        ("--backend usp --ring-degree 3", "a node of degree 4 cannot have 3 ring members"),
        ("--backend usp --ring-degree 1", "--ring-degree must be 2 to 64, got 1"),
        ("--backend ring --ring-degree 2", "--ring-degree 2 needs --backend usp or gather"),
        ("--window 3 --full-mask", "--window 3 is for causal masks, not for --full-mask"),
        ("--window -1", "--window must be 0 to 1048576, got -1"),
        ("--heads 7", "--heads 7 is no multiple of --kv-heads 2"),
        ("--degrees 1,3", "degree 3 does not divide the 4 ranks"),
        ("--ranks 0", "--ranks must be 1 to 64, got 0"),
        ("--ranks 100000", "--ranks must be 1 to 64, got 100000"),
        ("--head-dim 0", "--head-dim must be 1 to 4096, got 0"),
        ("--kv-heads -1", "--kv-heads must be 1 to 4096, got -1"),
        ("--timeout 0", "--timeout must be 1 to 86400, got 0"),
        ("--timeout nan", "--timeout must be 1 to 86400, got nan"),
        ("--seed 99999999999999999999", "--seed must be 0 to 9223372036854775807, got 999"),
        ("--lengths 99999999999999999999,1,1", "tokens, 1048576 at most"),
    ],
)
def test_flags_that_describe_no_plan_exit_two_with_one_line(
    capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    assert main([*FORCED.split(), *change.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-nsp verify: error: ") and message in line


def test_a_rank_that_fails_exits_three_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("made up for the test")

    monkeypatch.setattr(verify, "nested_attention", fail)
    assert main([*FORCED.split(), "--head-dim", "8"]) == 3
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("megatron-nsp verify: rank ") and "MemoryError: made up" in line
    assert printed.out == ""
