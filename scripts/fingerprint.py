"""What a checkout plans and trains, bit by bit, to hold one revision against another.

    python scripts/fingerprint.py [CHECKOUT] [--plans 200] [--only plans|runs]

prints a line for every plan (policy, digest, time of the step) and for every training run (the
reported losses, and a hash over all weights and optimizer states that it ends with), and one hash
over all lines. It goes through what users see, the command line and `pretrain_nsp.py`, so that
revisions whose modules have other names can be compared:

    git worktree add /tmp/before REVISION
    diff <(python scripts/fingerprint.py /tmp/before) <(python scripts/fingerprint.py)

Runs are CPU ranks, five steps each, from one seed: dense and experts, every way to divide a node,
several micro-batches, a pipeline, recomputation with saved outputs, a sharded optimizer.
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]

TABLES = ("wikipedia", "source-code", "paper-mix")
MODELS = (("qwen3-30b-a3b", 32, 1), ("qwen3-235b-a22b", 64, 8), ("qwen3-30b-a3b", 16, 8))
"""Model, largest degree, expert-parallel size."""

# Plans command lines given on stdin, one JSON list a line, in one process of the checkout.
PLANNER = """
import contextlib, io, json, sys
from megatron_nsp.cli import main
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["plan", *json.loads(line), "--json"])
    told = json.loads(out.getvalue()) if status == 0 else {"refused": err.getvalue().strip()}
    keys = ("refused", "policy", "step_us")
    print(told.get("plan", {}).get("digest"), *(told[key] for key in keys if key in told))
"""

MODEL = (  # noqa: SIM905 - reads as the command line it is
    "--nsp-cpu --num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --hidden-dropout 0 --seq-length 512 --calculate-per-token-loss "
    "--max-position-embeddings 512 --tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-3 "
    "--log-interval 1 --seed 7 --train-iters 5 --nsp-batch-tokens 1400 --save-interval 5"
).split()
MOE = (  # noqa: SIM905
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0 "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
).split()
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
RUNS: dict[str, list[str]] = {
    "dense": [],
    "ulysses": ["--nsp-backend", "ulysses", "--nsp-policy", "root", "--nsp-max-degree", "2"],
    "ring": ["--nsp-backend", "ring", "--nsp-policy", "root"],
    "usp": ["--nsp-backend", "usp", "--nsp-policy", "root"],
    "gather": ["--nsp-backend", "gather", "--nsp-policy", "root"],
    "bfloat16, serial": ["--bf16", "--no-nsp-overlap", "--nsp-policy", "two-level"],
    "experts": MOE,
    "two micro-batches": ["--global-batch-size", "8", "--use-distributed-optimizer"],
    "pipeline": [
        *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4"),
        *("--nsp-token-budget", "700"),
    ],
    "saved": [*FULL, "--recompute-num-layers", "1", "--nsp-save-budget-gb", "2e-4"],
    "static layout": ["--nsp-input-layout", "static:2", "--nsp-policy", "two-level"],
    "tensor parallel": ["--tensor-model-parallel-size", "2"],
}


def settings(number: int) -> Iterator[list[str]]:
    """Command lines of `megatron-nsp plan`: lengths, ranks, experts, budgets, backends."""
    rng = random.Random(20261201)
    for seed in range(number):
        model, max_degree, experts = rng.choice(MODELS)
        ranks = rng.choice((8, 48, 64, 64))
        max_degree = min(max_degree, 16 if ranks == 48 else ranks)
        tokens = rng.choice((31250, 8000)) * ranks
        line = ["--lengths", rng.choice(TABLES), "--ranks", str(ranks), "--seed", str(seed)]
        line += ["--batch-tokens", str(tokens), "--max-len", str(rng.choice((192, 384)) * 1024)]
        line += ["--model", model, "--ep", str(experts if ranks % experts == 0 else 1)]
        line += ["--max-degree", str(max_degree), "--profile", "h200-ib"]
        line += ["--backend", rng.choice(("ulysses", "auto", "auto", "ring", "usp", "gather"))]
        line += rng.choice(([], [], ["--token-balance", "1.3"], ["--token-budget", "40000"]))
        line += ["--recompute", rng.choice(("none", "none", "selective", "full"))]
        yield line


def environment(checkout: Path) -> dict[str, str]:
    """One thread a rank, and the checkout's own package."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}


def plans(checkout: Path, number: int) -> Iterator[str]:
    """A line for every plan."""
    lines = "\n".join(json.dumps(line) for line in settings(number))
    done = subprocess.run(
        [sys.executable, "-c", PLANNER],
        input=lines, cwd=checkout, env=environment(checkout), stdout=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    for index, told in enumerate(done.stdout.splitlines()):
        yield f"plan {index}: {told}"


def write_corpus(prefix: Path) -> None:
    """Documents of random bytes with a long tail of lengths, 1 and the longest among them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(1)
    lengths = [1, 512, 2, *np.clip(rng.lognormal(3.8, 1.3, 200), 1, 512).astype(int).tolist()]
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint8)
    for length in lengths:
        tokens = rng.integers(0, 255, length).astype(np.uint8)
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")


def state_hash(folder: Path) -> str:
    """A hash over the bits of every tensor in a checkpoint, by name."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (step,) = folder.glob("iter_*")
    dcp_to_torch_save(step, folder / "whole.pt")
    total = hashlib.sha256()

    def add(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for place, each in enumerate(value):
                add(f"{name}.{place}", each)
        elif isinstance(value, torch.Tensor) and "rng" not in name:
            total.update(name.encode())
            total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    add("", torch.load(folder / "whole.pt", weights_only=False))
    return total.hexdigest()[:16]


def run(checkout: Path, folder: Path, flags: list[str]) -> str:
    """Trains five steps on four ranks; returns the losses and the hash of what they end with."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    data = ["--train-data-path", str(folder / "corpus"), "--save", str(folder / "saved")]
    done = subprocess.run(
        [sys.executable, *torchrun, "pretrain_nsp.py", *MODEL, *data, *flags],
        cwd=checkout, env=environment(checkout), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return "failed: " + " | ".join(done.stdout.splitlines()[-6:])
    losses = re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)
    return f"losses {' '.join(losses)}, state {state_hash(folder / 'saved')}"


def runs(checkout: Path) -> Iterator[str]:
    """A line for every run."""
    for name, flags in RUNS.items():
        with tempfile.TemporaryDirectory() as scratch:
            write_corpus(Path(scratch) / "corpus")
            yield f"run {name}: {run(checkout, Path(scratch), flags)}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the fingerprint of a checkout; returns the exit status."""
    parser = argparse.ArgumentParser(description="what a checkout plans and trains, bit by bit")
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--plans", type=int, default=200, help="batches to plan (%(default)s)")
    parser.add_argument("--only", choices=("plans", "runs"), help="leave the other part out")
    args = parser.parse_args(arguments)
    checkout = args.checkout.resolve()
    total, is_whole = hashlib.sha256(), True
    for part in ("plans", "runs"):
        if args.only not in (None, part):
            continue
        for line in plans(checkout, args.plans) if part == "plans" else runs(checkout):
            print(line, flush=True)
            total.update(line.encode())
            is_whole &= "failed" not in line
    print(f"all: {total.hexdigest()}")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
