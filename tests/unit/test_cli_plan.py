"""Pure tests of `megatron-nsp plan`: the JSON, the table, the errors. Case A1."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.cli import main
from megatron_nsp.plan.plan import Plan
from megatron_nsp.testing.scorer import mixture_bound_us, score_plan, work_bound_us

ROOT = Path(__file__).resolve().parents[2]


def run_plan(capsys, words: str) -> str:
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def test_the_json_holds_all_it_takes_to_check_it(capsys) -> None:
    words = "--lengths paper-mix --ranks 16 --batch-tokens 200000 --max-len 65536 --seed 3 --json"
    data = json.loads(run_plan(capsys, words))
    plan = Plan.from_dict(data["plan"])
    assert plan.digest == data["digest"] == data["plan"]["digest"]
    assert data["token_load"] == plan.token_load().tolist()
    score = score_plan(data["plan"], data["profile"])
    assert data["step_us"] == pytest.approx(score.load_us, rel=1e-12)
    assert data["load_us"] == pytest.approx(score.rank_load_us, rel=1e-12)
    bound_us = data["bound_us"]
    by_work_us = work_bound_us(data["plan"], data["profile"])
    assert by_work_us * (1 - 1e-9) <= bound_us
    assert bound_us <= max(by_work_us, mixture_bound_us(data["plan"], data["profile"])) * (1 + 1e-9)
    assert data["gap"] == pytest.approx(score.load_us / bound_us)
    assert data["gap_no_latency"] == pytest.approx(score.load_no_latency_us / bound_us)
    assert data["policy"] == "search"
    assert data["search_load_us"] == data["step_us"] <= min(data["policies"].values())
    fixed = {f"static-{degree}" for degree in (1, 2, 4, 8, 16)}
    assert set(data["policies"]) == {*fixed, "two-level", "disjoint-lpt", "megatron-dynamic-cp"}
    assert data["plan_ms"] > 0 and data["num_over_long"] >= 0 == data["num_dropped"]
    assert data == {**json.loads(run_plan(capsys, words)), "plan_ms": data["plan_ms"]}


def test_budget_and_chain_reach_the_plan(capsys) -> None:
    words = "--lengths 4000,4000,4000 --ranks 4 --token-budget 2000 --json"
    data = json.loads(run_plan(capsys, words))
    assert data["plan"]["num_micro_batches"] == 2 and data["plan"]["token_budget"] == 2000
    assert data["token_load_by_micro_batch"][0] != [0] * 4
    assert sum(data["token_load"]) == 12000
    words = "--lengths 9000,10 --ranks 12 --degrees 1,3,6 --heads 24 --kv-heads 6 --json"
    assert json.loads(run_plan(capsys, words))["plan"]["degrees"] == [1, 3, 6]


def test_a_profile_and_lengths_from_files(tmp_path, capsys) -> None:
    data = json.loads(run_plan(capsys, "--lengths 100 --ranks 2 --profile cpu-gloo --json"))
    others = ("model", "backend", "recompute", "recompute_share", "save_tokens", "overlap")
    fields = {k: v for k, v in data["profile"].items() if k not in others}
    fields = {k: v for k, v in fields.items() if not k.startswith("bwd_")}
    (tmp_path / "p.json").write_text(json.dumps({**fields, "name": "p", "latency_us": 7.0}))
    (tmp_path / "l.txt").write_text("100 0 300")
    words = f"--lengths {tmp_path}/l.txt --ranks 2 --profile {tmp_path}/p.json --max-len 200 --json"
    data = json.loads(run_plan(capsys, words))
    assert data["profile"]["latency_us"] == 7 and data["profile"]["name"] == "p"
    assert (data["num_dropped"], data["num_over_long"]) == (1, 1)


def test_flexsp_s_published_model_gives_its_makespan_and_bias(capsys) -> None:
    words = "--profile flexsp-gpt-7b-a100 --lengths 17280 --ranks 64 --max-degree 64 --json"
    data = json.loads(run_plan(capsys, words + " --token-budget 15591"))
    (node,) = data["plan"]["nodes"]
    length, degree = node["lengths"][0], node["degree"]
    speed = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}[degree]
    exchanged = 4 * 2 * 32 * 4096 * 2 * length / 2**20 / degree / speed
    expected_ms = (5.128e-6 * length**2 + 0.1839576 * length) / degree + exchanged
    assert max(data["load_us"]) == pytest.approx(expected_ms * 1e3, rel=1e-9)
    assert data["profile"]["bias_us"] == pytest.approx(629356.3)
    assert data["step_us"] == pytest.approx(max(data["load_us"]) + 629356.3)
    assert data["plan"]["degrees"][-1] == 64  # its 32 heads limit no degree
    score = score_plan(data["plan"], data["profile"])
    assert data["load_us"] == pytest.approx(score.rank_load_us)


def test_a_known_model_and_a_memory_size_give_shape_and_budget(capsys) -> None:
    words = "--lengths 4K,300 --ranks 16 --model qwen3-30b-a3b --ep 8 --tp 2 --memory-gb 60 --json"
    data = json.loads(run_plan(capsys, words.replace("4K", "4096")))
    model = data["profile"]["model"]
    assert (model["num_heads"], model["num_kv_heads"], model["stride"]) == (16, 2, 2)
    assert model["expert_degree"] == 8 and data["plan"]["token_budget"] > 4096
    assert data["step_us"] == pytest.approx(score_plan(data["plan"], data["profile"]).load_us)


def test_the_table_shows_what_a_person_asks_for(capsys) -> None:
    words = "--lengths wikipedia --ranks 8 --batch-tokens 100000 --max-len 32768"
    text, data = run_plan(capsys, words), json.loads(run_plan(capsys, f"{words} --json"))
    assert text.isascii() and max(map(len, text.splitlines())) <= 120
    ranks = re.findall(r"^ +(\d+)  (#+) +([\d.,]+) +([\d,]+)$", text, re.MULTILINE)
    assert [int(rank) for rank, *_ in ranks] == list(range(8))
    assert [int(tokens.replace(",", "")) for *_, tokens in ranks] == data["token_load"]
    load_ms = np.array(data["load_us"]) / 1e3
    told_ms = [float(ms.replace(",", "")) for *_, ms, _ in ranks]
    assert told_ms == pytest.approx(load_ms, abs=0.051)
    bars = np.array([len(bar) for _, bar, *_ in ranks])
    assert bars / bars.max() == pytest.approx(load_ms / load_ms.max(), abs=1 / bars.max())
    plan = Plan.from_dict(data["plan"])
    nodes = re.findall(r"^ +(\d+:\d+) +(\d+) +(\d+) +([\d,]+) ", text, re.MULTILINE)
    assert {label: (int(d), int(n), int(t.replace(",", ""))) for label, d, n, t in nodes} == {
        plan.tree.label(node): (
            plan.tree.degree(node),
            len(plan.samples_of(node)),
            int(plan.lengths[plan.samples_of(node)].sum()),
        )
        for node in plan.active_nodes()
    }
    best = min(data["policies"], key=data["policies"].get)
    for line in (
        f"batch     {plan.num_samples:,} samples, {plan.lengths.sum():,} tokens, longest ",
        "profile   h100-ib (estimate, ",
        f"step      {data['step_us'] / 1e3:,.1f} ms, found by {data['policy']}\n",
        f"imbalance {load_ms.max() / load_ms.mean():.3f} ",
        f"gap       {data['gap']:.4f} to the lower bound of {data['bound_us'] / 1e3:,.1f} ms; "
        f"{data['gap_no_latency']:.4f} without node latency\n",
        f"baseline  {best} is the best other policy: ",
    ):
        assert f"\n{line}" in f"\n{text}"
    many = run_plan(capsys, "--lengths wikipedia --ranks 64 --batch-tokens 400000 --max-len 9999")
    assert "1:*" in many and len(many.splitlines()) < 130
    two = run_plan(capsys, "--lengths 40,40,40 --ranks 4 --max-degree 1 --token-budget 40")
    assert "micro-batch" not in two
    assert "micro-batch 1" in run_plan(capsys, "--lengths 40,40 --ranks 1 --token-budget 40")
    assert "0 samples" in run_plan(capsys, "--lengths 0 --ranks 2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--lengths 10 --ranks 6 --max-degree 4",
            "--max-degree: degree 4 does not divide the 6 ranks of the domain",
        ),
        (
            "--lengths 10 --ranks 12 --degrees 1,3,6 --heads 28 --kv-heads 7 --backend ulysses",
            "--degrees: degree 3 cannot split 28 query and 7 key/value heads evenly",
        ),
        (
            "--lengths 10 --ranks 4 --degrees 1,2 --max-degree 2",
            "--degrees [1, 2] already says the largest degree, --max-degree 2 must not be given",
        ),
        ("--lengths 10 --ranks 4 --degrees 1,x", "--degrees takes whole numbers, got 1,x"),
        (
            "--lengths 9,4000 --ranks 4 --token-budget 900",
            "sample 1 of 4000 tokens needs 1000 tokens a rank at the largest degree 4, over "
            "--token-budget 900",
        ),
        (
            "--lengths 3 --ranks 4 --heads 7 --kv-heads 2",
            "--heads 7 must be a multiple of --kv-heads 2",
        ),
        ("--lengths 99999999999 --ranks 8", "the longest of 99999999999 tokens, are too much work"),
        ("--lengths 3 --ranks 0", "--ranks must be 1 to 65536, got 0"),
        ("--lengths 3 --ranks 100000000", "--ranks must be 1 to 65536, got 100000000"),
        ("--lengths 9,99999999999999999999 --ranks 2", "--lengths has 99999999999999999999 tokens"),
        ("--lengths 9223372036854775807 --ranks 2", "are too much work to plan"),
        ("--lengths=4,-5 --ranks 2", "--lengths 4,-5: length 1 is negative: -5"),
        (
            "--lengths 3 --ranks 2 --token-budget 9999999999999999999",
            "--token-budget must be 1 to 1099511627776, got 9999999999999999999",
        ),
        ("--lengths 3 --ranks 2 --model gpt", "no model gpt, only qwen3-30b-a3b, "),
        ("--lengths 3 --ranks 2 --tp 2", "--tp 2 needs --model"),
        (
            "--lengths 3 --ranks 2 --backend ring --profile flexsp-gpt-7b-a100",
            "--backend must be auto or ulysses with --profile flexsp-gpt-7b-a100",
        ),
        ("--lengths 3 --ranks 2 --model qwen3-8b --heads 4", "--heads must not be given too"),
        ("--lengths 3 --ranks 2 --model qwen3-8b --tp 3", "tensor parallelism 3 cannot split"),
        ("--lengths 3 --ranks 6 --model qwen3-30b-a3b --ep 4", "--ep 4 does not divide --ranks 6"),
        (
            "--lengths 3 --ranks 6 --model qwen3-30b-a3b --vpp 2",
            "--vpp 2 needs --pp of at least 2, got 1",
        ),
        ("--lengths 3 --ranks 2 --memory-gb 80", "--memory-gb 80.0 needs --model"),
        ("--lengths 3 --ranks 2 --memory-gb nan --model qwen3-8b", "--memory-gb must be positive"),
        (
            "--lengths 3 --ranks 2 --memory-gb 80 --model qwen3-8b --token-budget 9",
            "--memory-gb 80.0 gives a token budget, --token-budget 9 must not be given too",
        ),
        ("--lengths 3 --ranks 2 --memory-gb 9 --model qwen3-8b", "qwen3-8b does not fit"),
        ("--lengths 3 --ranks 2 --seed -1", "--seed must be at least 0, got -1"),
        (
            "--lengths 1,2 --ranks 2 --batch-tokens 10",
            "--batch-tokens 10 is more than the 3 tokens",
        ),
        ("--lengths wikipedia --ranks 2", "--lengths wikipedia needs --batch-tokens"),
        ("--lengths wiki --ranks 2", "--lengths wiki is neither a length table (paper-mix"),
        (
            "--lengths 3 --ranks 2 --profile x",
            "no profile x: neither a file of text nor one of a100",
        ),
    ],
)
def test_errors_are_one_line_and_status_two(capsys, words: str, message: str) -> None:
    assert main(["plan", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("megatron-nsp plan: error: ") and message in printed.err


def test_planning_from_the_shell_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['megatron'] = None; "
        "from megatron_nsp.cli import main; sys.exit(main())"
    )
    words = ["plan", "--lengths", "300,20", "--ranks", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["plan"]["num_ranks"] == 2


def test_a_reader_that_stops_reading_gets_no_traceback() -> None:
    code = "import sys; from megatron_nsp.cli import main; sys.exit(main())"
    words = "plan --lengths 300,20 --ranks 4096 --json"
    command = f"{sys.executable} -c '{code}' {words} | head -c 20"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(done.stdout) == 20 and done.stderr == ""


def test_the_table_names_backends_where_they_are_not_all_ulysses(capsys) -> None:
    words = "--lengths 400000,9 --ranks 16 --heads 5 --kv-heads 5 --profile h200-ib"
    text = run_plan(capsys, words)
    (row,) = [line for line in text.splitlines() if line.split()[:2] == ["16:0", "16"]]
    assert "backend" in text and row.split()[-2:] == ["ring", "16x1"]
    assert "backend" not in run_plan(capsys, f"{words} --backend ulysses")
    data = json.loads(run_plan(capsys, f"{words} --backend gather --json"))
    assert data["profile"]["backend"] == "gather"
    assert {"ring_degree": 16, "outer": "gather"}.items() <= data["plan"]["nodes"][0].items()
