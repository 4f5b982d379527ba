"""`make gpu` without a GPU: it says so, its smoke run passes, and its checks can fail."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.runtime import executor
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *flags],
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )


def test_without_a_gpu_one_line_says_so() -> None:
    assert run().stdout == "gpu: there is no NVIDIA GPU here, nothing was run\n"


def test_the_smoke_run_writes_a_result_and_a_profile(tmp_path: Path) -> None:
    assert "0 failures" in run("--device", "cpu", "--output", str(tmp_path)).stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["kernels"]) == 2 * len(gpu.CASES)
    assert len(result["degrees"]) == 2 * len(gpu.DEGREES)
    assert len(result["profile"]) == len(gpu.DEGREES) * len(gpu.CPU.head_lengths)
    profile = load_profile(str(tmp_path / "profile.json"))
    assert profile.is_estimate and sorted(profile.attention) == list(gpu.CPU.effort.lengths)


class WrongKernel(CpuFlashKernel):
    """Its gradient of the keys is 2% too large, on half of the heads alone."""

    def backward(self, dout: Any, state: Any, call: Any) -> Any:
        dq, dk, dv = super().backward(dout, state, call)
        return dq, dk * (1.02 if dout.shape[1] < 8 else 1.0), dv


def good_result() -> dict[str, Any]:
    fine = {"different": 0, "finite": True}
    return {"kernels": {}, "degrees": {}, "offsets": {}, "streams": fine}


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available_kernels", lambda device: [WrongKernel()])
    result = good_result() | {"kernels": gpu.check_kernels(CPU, gpu.CPU)}
    missed = gpu.failures(result)
    assert missed and all("head dim 256" in line and "dk is off" in line for line in missed)


def test_an_error_that_grows_with_the_degree_fails() -> None:
    table = gpu.errors_by_degree(WrongKernel(), CPU, 64, gpu.DEGREES)
    missed = gpu.failures(good_result() | {"degrees": table})
    assert missed and all("dk is off" in line for line in missed)


def test_a_number_that_is_none_fails() -> None:
    result = good_result() | {"kernels": {"a case": {"out": float("nan")}}}
    assert gpu.failures(result) == ["a case: out is off by nan, at most 0.01"]


class HastyQueue:
    """Hands out what is received before it is there, every fifth time."""

    def __init__(self) -> None:
        self.count = 0

    def issue(self, exchange: Exchange) -> Any:
        self.count += 1
        received = executor.run_exchange(exchange)
        if self.count % 5 == 0:
            received = torch.zeros_like(received)
        return type("Early", (), {"wait": lambda self: received})()


def test_a_queue_that_does_not_wait_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    serial = executor.build_queue(CPU, overlap=False)
    monkeypatch.setattr(
        executor, "build_queue", lambda _, streamed: HastyQueue() if streamed else serial
    )
    streams = gpu.check_streams(CpuFlashKernel(), CPU, gpu.CPU)
    assert streams["different"] == gpu.CPU.rounds
    assert len(gpu.failures(good_result() | {"streams": streams})) == 1
