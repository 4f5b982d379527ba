"""`megatron-nsp simulate` as a user calls it."""

import json

import numpy as np
import pytest

from megatron_nsp.cli import main
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.simulator.ablation import attention_only
from tests.unit.planner_cases import SMALL


def run_json(words: str, capsys: pytest.CaptureFixture[str]) -> dict:
    """What the command prints as JSON."""
    assert main(words.split()) == 0
    return json.loads(capsys.readouterr().out)


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "simulate --lengths paper-mix --ranks 16 --model qwen3-30b-a3b --ep 8 --batches 2 --json"
    )
    words += " --batches 2 --batch-tokens 300K --max-len 64K --profile h200-ib --memory-gb 100"
    words += " --offload-optimizer --save-gb 4 --policies two-level,auto --ablation"
    words += " --recompute full"
    assert main(words.split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == run_json(words, capsys)
    rows, reference = data["policies"], data["reference"]
    assert {"auto", "two-level", reference} <= set(rows) and len(data["batches"]) == 2
    assert rows[reference]["speedup"] == [1.0, 1.0]
    for row in rows.values():
        ratio = np.array(rows[reference]["step_us"]) / np.array(row["step_us"])
        np.testing.assert_allclose(row["speedup"], ratio)
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    missing = {name: sum(step_us) for name, step_us in data["ablation"].items()}
    assert list(missing) == ["full", "recompute", "overlap", "router", "cost model"]
    assert missing["full"] == sum(rows["auto"]["step_us"]) == min(missing.values())
    assert missing["recompute"] > missing["full"] < missing["cost model"]
    assert data["not_ablated"] == {}
    best = min(row["step_us"] for name, row in rows.items() if name.startswith("static"))
    assert sum(best) >= sum(rows[reference]["step_us"])
    assert all("does not fit the token budget" in why for why in data["failed"].values())
    assert main(words.replace("--json ", "").split()) == 0
    text = capsys.readouterr().out
    assert "predictions, not measurements" in text and f"speed-up over {reference}" in text


def test_fitted_times_have_no_cost_model_to_take_away(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --lengths wikipedia --ranks 8 --batches 1 --batch-tokens 60K --max-len 16K"
    words += " --profile flexsp-gpt-7b-a100 --policies two-level --ablation"
    why = "profile flexsp-gpt-7b-a100 holds one model's fitted times, not their parts"
    data = run_json(f"{words} --json", capsys)
    assert list(data["ablation"]) == ["full", "recompute", "overlap", "router"]
    assert data["not_ablated"] == {"cost model": why}
    assert main(words.split()) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("cost model")]
    assert line.split(maxsplit=2)[2] == f"cannot be taken away: {why}"
    fitted = CostModel(load_profile("flexsp-gpt-7b-a100"), SMALL, SPTree(2, (1, 2)))
    with pytest.raises(ValueError, match="the cost model cannot be taken away: profile flexsp"):
        attention_only(fitted)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batches 0", "--batches must be 1 to 1048576, got 0"),
        ("--micro-batches 0", "--micro-batches must be 1 to 1048576, got 0"),
        ("--save-gb nan", "--save-gb must be 0 to 1048576, got nan"),
        ("--policies auto,best", "--policies: no policy best, only cheap, all, auto, search"),
        ("--token-budget 100 --max-len 1000", "no static degree can plan every batch: static-1"),
        ("--max-len x", "argument --max-len: takes tokens such as 4096, 192K or 2M, got x"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    try:
        status = main(["simulate", "--lengths", "900,50", "--ranks", "4", *words.split()])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2 and message in printed.err and "Traceback" not in printed.err


def test_without_batch_tokens_a_table_gives_32k_a_rank_and_a_short_list_one_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "simulate --ranks 4 --batches 2 --max-len 16K --policies two-level --json --lengths"
    data = run_json(f"{words} wikipedia", capsys)
    assert all(131_072 <= batch["tokens"] < 150_000 for batch in data["batches"])
    assert data["batches"][0] != data["batches"][1]
    data = run_json(f"{words} 900,50,70", capsys)
    assert data["batches"] == [{"samples": 3, "tokens": 1020}] * 2


def test_backends_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --ranks 8 --batches 1 --policies search --json --heads 5 --kv-heads 5"
    words += " --lengths 300000,9 --profile h200-ib --backend"
    steps = {
        backend: run_json(f"{words} {backend}", capsys)["policies"]["search"]["step_us"][0]
        for backend in ("ulysses", "ring", "usp", "gather", "auto")
    }
    assert steps["auto"] <= min(steps.values()) * 1.001  # a prediction, made before simulating
    assert 4 * steps["ring"] < steps["ulysses"] and steps["usp"] == steps["ring"]
