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
        ("--heads 6", "degree 4 cannot split --heads 6 and --kv-heads 2 evenly"),
        ("--heads 7", "--heads 7 is no multiple of --kv-heads 2"),
        ("--degrees 1,3", "degree 3 does not divide the 4 ranks"),
        ("--ranks 0", "the number of ranks must be at least 1, got 0"),
    ],
)
def test_flags_that_describe_no_plan_exit_two_with_one_line(
    capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    assert main([*FORCED.split(), *change.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-nsp verify: error: ") and message in line
