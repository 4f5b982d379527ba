"""Training, validation and test documents in Megatron's own loop, against losses of one rank.

Where weights never change, a loss says which documents it was taken of: one rank, all documents in
one step, gives the loss of every token.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_nsp.steps.draw import Blend, BlendDraw
from megatron_nsp.steps.sampler import BatchSampler, always
from tests.data_maker import write_documents
from tests.mcore.launch import Run, train

FROZEN = ["--lr", "0", "--probe-float64"]
VALID = list(range(20, 241, 20))


def document_losses(folder: Path, prefixes: list[str], num_tokens: int) -> list[list[float]]:
    """By document the losses of its targets, from one rank and one step."""
    flags = ["--data-path", *prefixes, "--nsp-batch-tokens", str(num_tokens), "--train-iters", "1"]
    losses = train(1, folder, *flags, *FROZEN).token_losses(0)
    by_document: dict[int, list[float]] = {}
    for (document, _), loss in sorted(losses.items()):
        by_document.setdefault(document, []).append(loss)
    return [by_document[document] for document in range(len(by_document))]


def evaluated(run: Run, part: str = "validation|test") -> list[float]:
    """The values of the lines that say a loss of evaluation, in their order."""
    line = r"validation loss at iteration \d+(?: on (\w+) set)? \| lm loss value: (\S+)"
    found = re.findall(line, run.output)
    return [float(value) for name, value in found if re.fullmatch(part, name or "validation")]


def mean(losses: list[list[float]], documents: list[int]) -> float:
    """The mean over all targets of some documents, as often as they are named."""
    return float(np.mean(np.concatenate([losses[document] for document in documents])))


def test_a_blend_that_is_split_is_trained_validated_and_tested_in_its_shares(
    tmp_path: Path,
) -> None:
    for seed, name in enumerate("ab"):
        write_documents(tmp_path / name, [30] * 40, seed)
    prefixes = [f"{tmp_path}/a", f"{tmp_path}/b"]
    losses = document_losses(tmp_path / "one", prefixes, 2400)
    flags = ["--data-path", "1", prefixes[0], "3", prefixes[1], "--split", "8,1,1"]
    flags += ["--nsp-batch-tokens", "240", "--train-iters", "4", "--eval-iters", "2"]
    run = train(2, tmp_path / "two", *flags, "--eval-interval", "2", *FROZEN)
    assert "nsp: documents: 64 to train on (25% " in run.output
    draw = BlendDraw(Blend([0, 32, 64], [1, 3]), np.full(64, True), seed=7)
    for loss in run.losses:  # eight documents a step, of the first 32 of each data set
        drawn = [draw.next() for _ in range(8)]
        expected = mean(losses, [number if number < 32 else number + 8 for number in drawn])
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    # Two steps of eight documents: the four of a once, those of b three times.
    for part, first, times in (("validation", 32, 3), ("test", 36, 1)):
        every = range(first, first + 4)
        expected = mean(losses, [*every, *([number + 40 for number in every] * 3)])
        values = evaluated(run, part)
        assert len(values) == times
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_m4_m5_evaluation_goes_on_where_it_was_and_may_take_all_or_nothing_else(
    tmp_path: Path,
) -> None:
    write_documents(tmp_path / "docs", [50] * 20, seed=3)
    write_documents(tmp_path / "valid", VALID, seed=5)
    losses = document_losses(tmp_path / "one", [str(tmp_path / "valid")], sum(VALID))
    flags = ["--train-data-path", str(tmp_path / "docs"), "--valid-data-path"]
    flags += [str(tmp_path / "valid"), "--nsp-batch-tokens", "300", *FROZEN]
    steps = ["--train-iters", "6"]
    some, every_other = ["--eval-iters", "1"], ["--eval-interval", "2"]
    sampler = BatchSampler(np.array(VALID), always(300), 512, seed=7)
    expected = [mean(losses, sampler.draw().documents.tolist()) for _ in range(4)]
    assert len({round(value, 6) for value in expected}) == 4
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    load = ["--load", str(tmp_path / "saved")]
    first = train(2, tmp_path / "first", *flags, *steps, *some, *every_other, *save)
    resumed = train(2, tmp_path / "resumed", *flags, *steps, *some, *every_other, *load)
    assert evaluated(first) == pytest.approx(expected[:1], rel=1e-6)
    assert evaluated(resumed) == pytest.approx(expected[1:], rel=1e-6)
    only = train(2, tmp_path / "only", *flags, *some, *load, "--skip-train")
    assert evaluated(only) == pytest.approx(expected[:1], rel=1e-6)
    assert "nsp step" not in only.output and "going over" not in only.output
    # All documents each time, some of them carried over to the next step.
    budget = ["--full-validation", *every_other, "--nsp-token-budget", "140"]
    whole = train(2, tmp_path / "whole", *flags, *steps, *budget)
    assert evaluated(whole) == pytest.approx([mean(losses, list(range(12)))] * 4, rel=1e-6)


def test_m2_a_step_that_is_skipped_keeps_its_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "docs", [130, 77, 64, 31, 8, 3, 1, 90, 55, 12, 5] * 5, seed=3)
    flags = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", "300"]
    flags += ["--train-iters", "5", "--nsp-token-budget", "80"]  # two ranks hold 160 of 300 tokens
    flags += ["--pipeline-model-parallel-size", "2"]
    plain = train(4, tmp_path / "plain", *flags)
    skipped = train(4, tmp_path / "skipped", *flags, "--iterations-to-skip", "2", "3")
    assert "carried to the next step: " in plain.output
    assert len(skipped.steps[-1]) == 3  # updates of the optimizer
    for own, step in enumerate((0, 3, 4)):
        assert skipped.token_losses(own).keys() == plain.token_losses(step).keys()
    numbers = [
        re.findall(r"^nsp step (\d+) \|.* samples: (\d+)", r.output, re.M) for r in (plain, skipped)
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 5


def test_mock_data_trains_as_one_rank_and_masks_the_end_of_documents(tmp_path: Path) -> None:
    flags = ["--mock-data", "--nsp-batch-tokens", "1500", "--train-iters", "2", "--eval-iters", "1"]
    flags += ["--eval-interval", "10", "--probe-float64", "--eod-mask-loss"]
    flags += ["--nsp-policy", "root"]
    one, two = (train(ranks, tmp_path / str(ranks), *flags) for ranks in (1, 2))
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(evaluated(two), evaluated(one), rtol=1e-6)
    assert len(evaluated(one)) == 2  # validation and test
    targets = sum(map(int, re.findall(r"targets: (\d+)", one.output)))
    trained = sum(len(one.token_losses(step)) for step in range(2))
    assert 0 < targets - trained < 40  # a token in 256 is the end of a document


@pytest.mark.parametrize("parallel", ["--tensor-model-parallel-size", "--nsp-max-degree"])
def test_m10_a_token_outside_the_vocabulary_ends_the_run_in_one_line(
    tmp_path: Path, parallel: str
) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/docs.bin", dtype=np.int32)
    for number in range(20):
        tokens = np.full(40, 200)
        tokens[11] = 230 if number == 7 else 3
        builder.add_document(tokens, [40])
    builder.finalize(f"{tmp_path}/docs.idx")
    flags = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", "800", "--train-iters"]
    flags += ["1", "--vocab-size", "220", parallel, "2"]  # Megatron pads it to 256 rows
    run = train(2, tmp_path / "run", *flags, check=False)
    assert run.returncode
    message = (
        r"^nsp: rank \d.*: ValueError: document 7 of .*docs has token 230 at place 11, the voc"
    )
    assert re.findall(message, run.output, re.M)
    assert "lm loss:" not in run.output
