"""Starts training runs for the tests in this folder and reads back what the probe wrote."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "tests" / "mcore" / "probe.py"

MODEL = (
    "--nsp-cpu --num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --hidden-dropout 0 --seq-length 512 "
    "--max-position-embeddings 512 --calculate-per-token-loss --tokenizer-type NullTokenizer "
    "--vocab-size 256 --lr 1e-3 --log-interval 1 --seed 7"
).split()
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0 "
    "--moe-token-dispatcher-type alltoall"
).split()


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        steps: by rank, the probe's steps.
        output: everything the ranks printed.
        returncode: the launcher's exit code.
    """

    steps: list[list[dict[str, Any]]] = field(repr=False)
    output: str = field(repr=False)
    returncode: int

    @property
    def losses(self) -> list[float]:
        """The reported loss of each step."""
        return [step["loss"] for step in self.steps[-1]]

    def grads(self, step: int) -> dict[str, torch.Tensor]:
        """Every parameter's gradient in a step, from whichever ranks hold it."""
        merged: dict[str, torch.Tensor] = {}
        for rank in self.steps:
            merged.update(rank[step]["grads"])
        return merged

    def token_losses(self, step: int) -> dict[tuple[int, int], float]:
        """Loss of each target by (document, position)."""
        entries = [entry for rank in self.steps for entry in rank[step]["tokens"]]
        losses = {(document, position): loss for document, position, loss in entries}
        assert len(losses) == len(entries), "a token was counted twice"
        return losses


def environment() -> dict[str, str]:
    """One thread a rank, and the package importable from the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def command(num_ranks: int, script: Path, *args: str) -> list[str]:
    """The launcher's command line: torchrun, also for one rank."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node".split()
    return [sys.executable, *torchrun, str(num_ranks), str(script), *args]


def train(num_ranks: int, out: Path, *args: str, timeout_s: float = 240, check: bool = True) -> Run:
    """Trains under the probe.

    Args:
        num_ranks: ranks to start.
        out: folder for the probe's files.
        *args: flags beside those of MODEL.
        timeout_s: limit of the run.
        check: fail when the run does.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command(num_ranks, PROBE, str(out), *MODEL, *args),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"run failed with {done.returncode}:\n{done.stdout[-6000:]}")
    files = [out / f"rank{rank}.pt" for rank in range(num_ranks)]
    steps = [torch.load(file, weights_only=False) for file in files if file.exists()]
    return Run(steps, done.stdout, done.returncode)
