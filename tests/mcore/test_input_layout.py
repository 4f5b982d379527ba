"""A loader that knows no plan, in Megatron's own loop: the bits of a run that reads by plan."""

from pathlib import Path

import pytest

from megatron_nsp.plan.tree import SPTree
from tests.data_maker import write_documents
from tests.mcore.launch import Run, train
from tests.mcore.plans import EVERY_KIND, batches, record

TREE = SPTree(4, (1, 2, 4))
BATCH_TOKENS = 150
STEPS = len(EVERY_KIND)
LENGTHS = [130, 77, 64, 31, 8, 3, 1, 90, 55, 200, 12, 5] * 5


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A few documents a step."""
    write_documents(tmp_path / "docs", LENGTHS, seed=3)
    return ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", str(BATCH_TOKENS)]


def assert_same_bits(plan: Run, static: Run, steps: int) -> None:
    assert len(plan.losses) == len(static.losses) == steps
    assert static.losses == plan.losses
    for step in range(steps):
        assert static.token_losses(step) == plan.token_losses(step)
        expected, got = plan.grads(step), static.grads(step)
        assert expected and expected.keys() == got.keys()
        assert all(got[name].equal(grad) for name, grad in expected.items())


def static_reads(batch_documents: list[int], rank: int, degree: int) -> list[tuple[int, int, int]]:
    """What a rank of four reads: its slice of its group's stream, and one token more for labels."""
    reads, num_groups, place = [], 4 // degree, rank % degree
    mine = batch_documents[rank // degree :: num_groups]
    tokens = sum(LENGTHS[document] for document in mine)
    low, high = tokens * place // degree, tokens * (place + 1) // degree
    offset = 0
    for document in mine:
        length = LENGTHS[document]
        start, stop = max(low - offset, 0), min(high - offset, length)
        if start < stop:
            reads.append((document, start, min(stop + 1, length)))
        offset += length
    return reads


def test_static_input_trains_to_the_same_bits(tmp_path: Path, flags: list[str]) -> None:
    """Every kind of placement; ranks that hold nothing, in the plan's layout and in the other."""
    drawn = batches(tmp_path / "docs", STEPS, BATCH_TOKENS)
    record(tmp_path / "plans", TREE, drawn)
    flags += ["--train-iters", str(STEPS), "--nsp-policy", f"file:{tmp_path / 'plans'}"]
    plan = train(4, tmp_path / "plan", *flags)
    some_rank_reads_nothing = False
    for degree in (1, 2, 4):
        layout = ["--nsp-input-layout", f"static:{degree}"]
        static = train(4, tmp_path / f"static-{degree}", *flags, *layout)
        assert f"input layout static:{degree}" in static.output
        assert_same_bits(plan, static, STEPS)
        for step, batch in enumerate(drawn):
            for rank in range(4):
                expected = static_reads(batch.documents.tolist(), rank, degree)
                assert static.steps[rank][step]["reads"] == expected
                some_rank_reads_nothing |= not expected
    assert some_rank_reads_nothing


def test_with_evaluation_carried_samples_and_tensor_parallel_ranks(
    tmp_path: Path, flags: list[str]
) -> None:
    write_documents(tmp_path / "valid", [140, 1, 77, 50, 32], seed=4)
    flags[0] = "--train-data-path"
    flags += ["--valid-data-path", str(tmp_path / "valid"), "--train-iters", "3"]
    flags += ["--eval-iters", "2", "--eval-interval", "2", "--nsp-token-budget", "110"]
    flags += ["--global-batch-size", "4", "--nsp-batch-tokens", "500"]
    flags += ["--tensor-model-parallel-size", "2"]
    plan = train(4, tmp_path / "plan", *flags)
    static = train(4, tmp_path / "static", *flags, "--nsp-input-layout", "static:2")
    assert static.losses == plan.losses and len(plan.losses) == 3
    assert "carried to the next step: " in static.output
    said = [
        [line for line in run.output.splitlines() if "validation loss at" in line]
        for run in (plan, static)
    ]
    assert said[0] and said[0] == said[1]


def test_with_pipeline_stages(tmp_path: Path, flags: list[str]) -> None:
    flags += ["--train-iters", "3", "--global-batch-size", "6"]
    flags += ["--pipeline-model-parallel-size", "2"]
    plan = train(4, tmp_path / "plan", *flags)
    static = train(4, tmp_path / "static", *flags, "--nsp-input-layout", "static:2")
    assert_same_bits(plan, static, 3)
