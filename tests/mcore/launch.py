"""Starts training runs for the tests in this folder and reads back what the probe wrote."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "tests" / "mcore" / "probe.py"

MODEL = (  # noqa: SIM905 - reads as the command line it is
    "--nsp-cpu --num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --hidden-dropout 0 --seq-length 512 "
    "--max-position-embeddings 512 --calculate-per-token-loss --tokenizer-type NullTokenizer "
    "--vocab-size 256 --lr 1e-3 --log-interval 1 --seed 7 --split 1 --eval-iters 0"
).split()
MOE = (  # noqa: SIM905
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0 "
    "--moe-token-dispatcher-type alltoall"
).split()


LATENT = (  # noqa: SIM905
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm --rope-type"
).split()
"""Latent attention; the type of rotary embedding follows."""


def model_flags(args: Sequence[str]) -> list[str]:
    """MODEL and `args`.

    Latent attention has a key for every query head; what is not one list cannot be split.
    """
    text = " ".join(MODEL)
    if "--multi-latent-attention" in args:
        text = text.replace(" --group-query-attention", "")
    if "--data-path" not in args:
        text = text.replace(" --split 1", "")
    return [*text.split(), *args]


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

    @property
    def mtp_losses(self) -> list[list[float]]:
        """The reported loss of each depth of multi-token prediction, in each step."""
        return [step.get("mtp_losses", []) for step in self.steps[-1]]

    def grads(self, step: int) -> dict[str, torch.Tensor]:
        """Every parameter's gradient in a step, put together from what each rank holds of it."""
        whole: dict[str, torch.Tensor] = {}
        for rank in self.steps:
            for name, part in rank[step]["grads"].items():
                known = whole.setdefault(name, part)
                both = ~(known.isnan() | part.isnan())
                assert known[both].equal(part[both]), f"ranks have other gradients of {name}"
                whole[name] = known.where(part.isnan(), part)
        for name, grad in whole.items():
            assert not grad.isnan().any(), f"no rank has all of the gradient of {name}"
        return whole

    def layer_input_grads(self, step: int) -> dict[tuple[int, int, int], torch.Tensor]:
        """Gradient of each row that enters a layer, by (layer, document, position)."""
        entries = [entry for rank in self.steps for entry in rank[step]["layer_inputs"]]
        grads = {
            (layer, *token): row
            for layer, tokens, rows in entries
            for token, row in zip(tokens, rows, strict=True)
        }
        assert len(grads) == sum(len(rows) for _, _, rows in entries), "a token was counted twice"
        return grads

    def token_losses(self, step: int) -> dict[tuple[int, int], float]:
        """Loss of each target by (document, position)."""
        entries = [entry for rank in self.steps for entry in rank[step]["tokens"]]
        losses = {(document, position): loss for document, position, loss in entries}
        assert len(losses) == len(entries), "a token was counted twice"
        return losses


def shared_checkpoint(folder: Path, prefix: Path, *args: str) -> list[str]:
    """Saves one rank's initial weights; returns the flags that start from them."""
    path = str(folder / "checkpoint")
    flags = ["--data-path", str(prefix), "--train-iters", "1", "--lr", "0"]
    flags += ["--save", path, "--save-interval", "1", "--nsp-batch-tokens", "64"]
    train(1, folder / "checkpoint-run", *flags, *args)
    return ["--load", path, "--finetune", "--no-load-optim", "--no-load-rng"]


def environment() -> dict[str, str]:
    """One thread a rank, and the package importable from the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def command(num_ranks: int, script: Path, *args: str) -> list[str]:
    """The launcher's command line: torchrun, also for one rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [sys.executable, *torchrun, str(num_ranks), str(script), *args]


@cache
def fork_server(program: str, float64: bool) -> "subprocess.Popen[str]":
    """The server that forks the ranks of this program in this test session."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.mcore.fork_server", program]
        + ["--float64"] * float64,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(os.killpg, server.pid, signal.SIGKILL)
    return server


def run_forked(
    program: str, float64: bool, num_ranks: int, argv: list[str], log: Path, timeout_s: float = 240
) -> int:
    """Runs a program of the fork server; returns the exit code.

    Args:
        program: which one.
        float64: whether CPU mode computes in double precision.
        num_ranks: ranks to start.
        argv: the program's arguments.
        log: file that everything the ranks print is added to.
        timeout_s: limit of the run.
    """
    server = fork_server(program, float64)
    assert server.stdin is not None and server.stdout is not None
    job = {"num_ranks": num_ranks, "argv": argv, "log": str(log)}
    print(json.dumps(job), file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], timeout_s)[0]:
        os.killpg(server.pid, signal.SIGKILL)
        fork_server.cache_clear()
        raise AssertionError(f"no answer within {timeout_s} s:\n{log.read_text()[-6000:]}")
    return int(server.stdout.readline())


def train(num_ranks: int, out: Path, *args: str, timeout_s: float = 240, check: bool = True) -> Run:
    """Trains under the probe, on ranks forked from a warm process.

    Args:
        num_ranks: ranks to start.
        out: folder for the probe's files.
        *args: flags beside those of MODEL.
        timeout_s: limit of the run.
        check: fail when the run does.
    """
    out.mkdir(parents=True, exist_ok=True)
    argv, log = [str(out), *model_flags(args)], out / "output.log"
    code = run_forked("probe", "--probe-float64" in args, num_ranks, argv, log, timeout_s)
    return finished(num_ranks, out, log.read_text(), code, check)


def train_with_torchrun(num_ranks: int, out: Path, *args: str, timeout_s: float = 240) -> Run:
    """The same under torchrun; the run may fail."""
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command(num_ranks, PROBE, str(out), *model_flags(args)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return finished(num_ranks, out, done.stdout, done.returncode, check=False)


def finished(num_ranks: int, out: Path, output: str, returncode: int, check: bool) -> Run:
    """Reads back what the probe wrote."""
    if check and returncode:
        raise AssertionError(f"run failed with {returncode}:\n{output[-6000:]}")
    files = [out / f"rank{rank}.pt" for rank in range(num_ranks)]
    steps = [torch.load(file, weights_only=False) for file in files if file.exists()]
    return Run(steps, output, returncode)
