"""Megatron's batch flags: the steps that they make, and what Megatron counts meanwhile."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.num_microbatches_calculator import (
    StepBatchsizeNumMicroBatchesCalculator as Schedule,
)

from megatron_nsp.mcore.batch_sizes import BatchSizes
from megatron_nsp.steps.sampler import StepSize
from tests.data_maker import write_documents
from tests.mcore.command_line import parse
from tests.mcore.launch import MODEL, Run, train

LENGTHS = np.array([130, 77, 64, 31, 8, 3, 1, 90, 55, 200, 12, 5] * 5)


def sizes(**flags: object) -> BatchSizes:
    """The sizes of a job of 8 data-parallel ranks."""
    args = SimpleNamespace(
        world_size=16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        hybrid_context_parallel=False,
        micro_batch_size=1,
        global_batch_size=None,
        eval_micro_batch_size=None,
        eval_global_batch_size=None,
        step_batch_size_schedule=None,
        decrease_batch_size_if_needed=False,
        seq_length=100,
        nsp_max_length=None,
        nsp_batch_tokens=None,
    )
    vars(args).update(flags)
    return BatchSizes.from_args(args, LENGTHS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({}, StepSize(800, 1)),
        ({"global_batch_size": 32}, StepSize(3200, 4)),
        ({"global_batch_size": 32, "micro_batch_size": 2}, StepSize(3200, 2)),
        ({"micro_batch_size": 4}, StepSize(3200, 1)),
        # Two groups of four ranks: a rank holds a quarter of a sequence at a time, as before.
        ({"global_batch_size": 32, "context_parallel_size": 4}, StepSize(3200, 16)),
        ({"global_batch_size": 35, "decrease_batch_size_if_needed": True}, StepSize(3200, 4)),
        ({"global_batch_size": 32, "nsp_batch_tokens": 500}, StepSize(500, 4)),
        # Documents are what hybrid context parallelism counts: 56.333 tokens each.
        ({"global_batch_size": 32, "hybrid_context_parallel": True}, StepSize(1803, 4)),
        ({"seq_length": None, "nsp_max_length": 50}, StepSize(400, 1)),
    ],
)
def test_what_a_step_holds(flags: dict[str, object], size: StepSize) -> None:
    if flags.get("decrease_batch_size_if_needed"):
        flags = flags | {"eval_global_batch_size": 8}
    assert {sizes(**flags).train(step) for step in range(3)} == {size}


def test_an_evaluation_step_has_a_size_of_its_own() -> None:
    own = sizes(
        global_batch_size=32, eval_global_batch_size=64, eval_micro_batch_size=4, micro_batch_size=2
    )
    assert own.train(0) == StepSize(3200, 2) and own.valid(0) == StepSize(6400, 2)


def test_the_schedule_is_megatrons_at_every_step() -> None:
    text = "0:8 2.4K:16 7K:40"
    scheduled, calculator = (
        sizes(step_batch_size_schedule=text),
        Schedule(1, 8, False, 1, text, 100),
    )
    consumed, found = 0, []
    for step in range(12):
        calculator.update(consumed, True)
        samples = calculator.get_current_global_batch_size()
        found.append(StepSize(samples * 100, calculator.get()))
        assert scheduled.train(step) == found[-1]
        consumed += samples
    assert [size.num_micro_batches for size in found] == [1, 1, 1, 2, 2, 2, 5, 5, 5, 5, 5, 5]
    assert scheduled.train(4) == found[4]  # asked again


def test_the_largest_step_of_a_schedule_holds_the_tokens_that_are_given() -> None:
    given = sizes(step_batch_size_schedule="0:8 800:40", nsp_batch_tokens=1000)
    assert [given.train(step) for step in range(2)] == [StepSize(200, 1), StepSize(1000, 5)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"global_batch_size": 12},
            "--global-batch-size 12 is no multiple of --micro-batch-size 1 times the 8 "
            "data-parallel ranks",
        ),
        (
            {"global_batch_size": 4, "decrease_batch_size_if_needed": True},
            "--global-batch-size 4 is no multiple of --micro-batch-size 1 times the 8 "
            "data-parallel ranks",
        ),
        (
            {"eval_global_batch_size": 12, "micro_batch_size": 2},
            "--eval-global-batch-size 12 is no multiple of --micro-batch-size 2 times the 8 "
            "data-parallel ranks",
        ),
        (
            {"step_batch_size_schedule": "0:8 1K:12"},
            "--step-batch-size-schedule 0:8 1K:12: 12 is no multiple of --micro-batch-size 1 times "
            "the 8 data-parallel ranks",
        ),
        (
            {"step_batch_size_schedule": "500:8"},
            "--step-batch-size-schedule 500:8: first schedule entry must have threshold 0, got 5",
        ),
        (
            {"step_batch_size_schedule": "8"},
            '--step-batch-size-schedule 8: Invalid schedule entry "8". Expected format: '
            '"THRESHOLD:BATCH_SIZE"',
        ),
    ],
)
def test_batches_that_do_not_divide(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sizes(**flags)


def test_a_schedule_has_several_numbers_of_micro_batches() -> None:
    assert sizes(step_batch_size_schedule="0:8 800:40").micro_batch_numbers == {1, 5}
    assert sizes(global_batch_size=24).micro_batch_numbers == {3}


@pytest.mark.usefixtures("help_texts")
@pytest.mark.parametrize(
    "flag", ["--eval-global-batch-size 3 --global-batch-size 6", "--step-batch-size-schedule 0:3"]
)
def test_every_number_of_micro_batches_is_checked_against_virtual_stages(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, flag: str
) -> None:
    stages = "--num-layers 4 --pipeline-model-parallel-size 2"
    flags = f"{stages} --num-virtual-stages-per-pipeline-rank 2 --split 1,1 --eval-iters 1 {flag}"
    message = "^--global-batch-size must be at least 6 with 2 virtual stages on 3 data-parallel"
    with pytest.raises(ValueError, match=message):
        parse(monkeypatch, [*MODEL, "--data-path", str(prefix), *flags.split()])


@pytest.mark.usefixtures("help_texts")
def test_virtual_stages_run_the_steps_of_a_schedule(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    stages = "--num-layers 4 --pipeline-model-parallel-size 2"
    flags = f"{stages} --num-virtual-stages-per-pipeline-rank 2 --step-batch-size-schedule"
    given = [*MODEL, "--data-path", str(prefix), *flags.split(), "0:6 51200:12"]
    _, job = parse(monkeypatch, [*given, "--split", "1"])
    assert job.size.batches.micro_batch_numbers == {2, 4}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "docs"
    write_documents(path, LENGTHS.tolist(), seed=3)
    return path


def iterations(run: Run) -> list[tuple[str, ...]]:
    """Of each step in Megatron's log: consumed samples and the batch size."""
    line = r"consumed samples: +(\d+) \|.*global batch size: +(\d+) \|"
    return re.findall(line, run.output)


def test_a_recipe_with_context_parallelism_trains_on_the_documents_of_one_rank(
    tmp_path: Path, prefix: Path
) -> None:
    """Batches are counted by groups of two ranks: four steps of 4 samples, 2 groups, 2 passes."""
    flags = ["--data-path", str(prefix), "--seq-length", "128", "--train-samples", "16"]
    flags += ["--global-batch-size", "4", "--lr-decay-samples", "16", "--lr-warmup-samples", "8"]
    flags += ["--cp-comm-type", "a2a", "--dataloader-type", "single"]
    one = train(1, tmp_path / "one", *flags)
    four = train(4, tmp_path / "four", *flags, "--context-parallel-size", "2")
    assert iterations(four) == [("4", "4"), ("8", "4"), ("12", "4"), ("16", "4")]
    assert iterations(one) == iterations(four)
    np.testing.assert_allclose(four.losses, one.losses, rtol=1e-5)
    rates = r"learning rate: ([\d.E+-]+)"
    assert re.findall(rates, four.output) == re.findall(rates, one.output)
    assert "2 micro-batches a step of 512 tokens (4 samples of 128 tokens)" in four.output
    said = [line for line in four.output.splitlines() if "is replaced" in line]
    assert [line.split()[1] for line in said] == [
        "--dataloader-type",
        "--context-parallel-size",
        "--cp-comm-type",
    ]


def test_the_micro_batches_of_a_step_follow_a_schedule(tmp_path: Path, prefix: Path) -> None:
    """Also of a run that resumes in the middle."""
    flags = ["--data-path", str(prefix), "--seq-length", "128", "--save", str(tmp_path / "saved")]
    flags += ["--step-batch-size-schedule", "0:2 512:4 1280:8", "--save-interval", "3"]
    through = train(2, tmp_path / "through", *flags, "--train-iters", "6")
    found = iterations(through)
    assert [int(size) for _, size in found] == [2, 2, 4, 4, 8, 8]
    assert [int(count) for count, _ in found] == [2, 4, 8, 12, 20, 28]
    flags += ["--load", str(tmp_path / "saved"), "--ckpt-step", "3"]
    resumed = train(2, tmp_path / "resumed", *flags, "--train-iters", "6")
    assert iterations(resumed) == found[3:]
    assert resumed.losses == through.losses[3:]
