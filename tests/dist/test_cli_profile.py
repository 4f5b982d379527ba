"""`megatron-nsp profile` as a user calls it: what it writes can be planned with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.cli import main
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.runtime.profiler import fit_line

ROOT = Path(__file__).resolve().parents[2]


def test_a_measured_profile_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    assert main(["profile", str(path), "--ranks", "4", "--quick"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"wrote {path}: measured on 4 ranks")
    profile = load_profile(str(path))
    assert profile.name == "mine" and not profile.is_estimate
    assert profile.intra_bytes_per_s is not None and profile.inter_bytes_per_s is None
    assert {name: sorted(table) for name, table in profile.exchanges.items()} == {
        name: [2, 4] for name in ("ulysses", "ring", "gather")
    }
    assert profile.merged_elements_per_s is not None and profile.merged_elements_per_s > 1e5
    assert sorted(profile.attention) == [16, 64, 256]
    assert set(profile.residuals) == {
        f"{name} exchange of degree {degree}" for name in profile.exchanges for degree in (2, 4)
    }
    assert profile.bias_us > 0 and profile.latency_us > 0
    words = f"plan --lengths 900,30 --ranks 4 --heads 4 --kv-heads 2 --profile {path} --json"
    assert main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["profile"]["is_estimate"] is False


def test_one_rank_measures_no_exchange_and_invents_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    assert main(["profile", str(path), "--ranks", "1", "--quick"]) == 0
    said = "; no exchanges inside a host, between hosts: not measured\n"
    assert capsys.readouterr().out.endswith(said)
    profile = load_profile(str(path))
    assert (profile.intra_bytes_per_s, profile.inter_bytes_per_s) == (None, None)
    assert profile.exchanges == profile.residuals == {}
    words = f"plan --lengths 900,30 --ranks 4 --heads 4 --kv-heads 2 --profile {path} --max-degree"
    assert main([*words.split(), "1"]) == 0
    capsys.readouterr()
    assert main([*words.split(), "4"]) == 2
    assert (
        "profile one has no inter_bytes_per_s: no exchange between hosts was"
        in capsys.readouterr().err
    )


def test_under_torchrun_it_measures_the_ranks_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("import sys\nfrom megatron_nsp.cli import main\nsys.exit(main())\n")
    path = tmp_path / "job.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), "profile", str(path), "--quick"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("wrote ") == 1
    assert sorted(load_profile(str(path)).exchanges["ulysses"]) == [2]


def test_the_fit_finds_the_line_and_says_how_far_points_are_from_it() -> None:
    sizes = np.array([1e3, 1e5, 1e7])
    rate, residual = fit_line(sizes, 50e-6 + sizes / 2e9)
    assert rate.bytes_per_s == pytest.approx(2e9) and rate.latency_us == pytest.approx(50)
    assert residual < 1e-9
    _, residual = fit_line(sizes, (50e-6 + sizes / 2e9) * np.array([1.0, 1.3, 1.0]))
    assert 0.05 < residual < 0.2
    rate, _ = fit_line(sizes, np.array([1e-3, 5e-4, 1e-4]))
    assert rate.bytes_per_s == pytest.approx(1e11) and rate.latency_us == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("/no/such/p.json", "/no/such/p.json: there is no folder /no/such"),
        ("p.json --ranks 0", "--ranks must be 1 to 64, got 0"),
        ("p.json --heads 0", "--heads must be 1 to 16777216, got 0"),
        ("p.json --heads 5", "--heads 5 must be a multiple of --kv-heads 2"),
        ("p.json --model qwen3-8b --layers 2", "--layers must not be given too"),
        ("p.json --model x", "no model x, only qwen3-30b-a3b"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["profile", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_heads_that_do_not_divide_are_measured_with_rings(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    words = f"profile {path} --ranks 2 --heads 5 --kv-heads 5 --quick"
    assert main(words.split()) == 0
    profile = load_profile(str(path))
    assert set(profile.exchanges) == {"ring", "gather"}
    assert profile.intra_bytes_per_s == profile.exchanges["ring"][2].bytes_per_s
