"""`--nsp-check`: what it says of a job, on a machine that has neither its ranks nor its GPUs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_maker import write_documents
from tests.mcore.launch import MODEL, ROOT, environment

LENGTHS = [130, 77, 64, 31, 8, 3, 1, 90, 55, 200, 12, 600] * 20

LARGE = (  # noqa: SIM905 - a recipe for GPUs, with Transformer Engine
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 4 --seq-length 512 --max-position-embeddings 512 --bf16 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --lr 1e-4 "
    "--train-iters 100 --micro-batch-size 1 --global-batch-size 32 --tensor-model-parallel-size 2 "
    "--sequence-parallel --pipeline-model-parallel-size 2 --context-parallel-size 2 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model no/such --use-distributed-optimizer"
).split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "docs"
    write_documents(path, LENGTHS, seed=3)
    return path


def check(*flags: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command line by itself: no launcher, no world size."""
    kept = {k: v for k, v in environment().items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "pretrain_nsp.py"), *flags],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_recipe_for_gpus_is_checked_where_there_are_none(prefix: Path) -> None:
    data = ["--data-path", str(prefix), "--nsp-token-budget", "400", "--nsp-check", "32"]
    done = check(*LARGE, *data, CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("nsp") for line in lines)
    assert lines[0] == (
        "nsp: 32 ranks: tensor 2 x pipeline 2 x a domain of 8 data-parallel ranks, expert "
        "parallel 1"
    )
    text = done.stdout
    assert "nsp: --context-parallel-size 2 is replaced" in text
    assert "nsp: no GPU here: one of compute capability 9.0 is assumed" in text
    assert "nsp: Transformer Engine is not installed here: 2.14.0 is assumed" in text
    assert "a vocabulary of 131072 is counted, assumed" in text
    # 4 groups of 2 ranks; a domain has 1 node of 8, 2 of 4 and 4 of 2 ranks.
    assert "8 micro-batches a step of 16384 tokens (32 samples of 512 tokens)" in text
    assert "degrees [1, 2, 4, 8], 3 of 28 groups on this rank" in text
    assert re.search(r"activations of at most \d+ tokens .*--nsp-token-budget 400\)", text)
    steps = [line for line in lines if line.startswith("nsp step")]
    assert len(steps) == 3 and re.search(r"left out: \d+ over-long", text)
    assert lines[-1] == "nsp: checked; nothing was started"


def test_the_steps_of_a_check_are_those_of_the_run(prefix: Path) -> None:
    """On one rank, which trains."""
    flags = [*MODEL, "--data-path", str(prefix), "--global-batch-size", "2", "--train-iters", "2"]
    told = []
    for done in (check(*flags, "--nsp-check"), check(*flags)):
        assert done.returncode == 0, done.stderr
        lines = re.findall(r"^nsp step .*", done.stdout, re.MULTILINE)
        told.append([re.sub(r" \| (plan|exposed in step \d): [^|]*", "", line) for line in lines])
    assert len(told[0]) == 2 and told[0] == told[1]


def test_what_cannot_be_used_is_said_in_one_line(prefix: Path) -> None:
    flags = [*MODEL, "--data-path", str(prefix), "--nsp-max-degree", "4", "--nsp-check", "6"]
    done = check(*flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        "pretrain_nsp.py: error: --nsp-max-degree: degree 4 does not divide the 6 ranks of the "
        "domain"
    ]
