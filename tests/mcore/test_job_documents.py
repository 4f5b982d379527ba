"""What each part of a run gets, from the command line on: all that stands before the run."""

import sys
from pathlib import Path

import pytest
from megatron.training.global_vars import unset_global_variables

from megatron_nsp.mcore.job import Job
from megatron_nsp.mcore.pretrain import parse_job
from tests.data_maker import write_documents
from tests.mcore.launch import MODEL

pytestmark = pytest.mark.usefixtures("help_texts")

DEFAULTS = " ".join(MODEL).replace(" --split 1 --eval-iters 0", "").split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data sets of 100, 12 and 3 documents, one whose documents do not fit, and six ranks."""
    for name, lengths in (
        ("many", range(1, 101)),
        ("few", range(101, 113)),
        ("three", [7, 8, 9]),
        ("long", [600, 700]),
    ):
        write_documents(tmp_path / name, list(lengths), seed=0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    return tmp_path


def job_of(monkeypatch: pytest.MonkeyPatch, flags: str) -> Job:
    unset_global_variables()
    monkeypatch.setattr(sys, "argv", ["pretrain_nsp.py", *DEFAULTS, *flags.split()])
    args, job = parse_job()
    assert job.args is args and args.dataloader_type == "external" and not args.full_validation
    return job


def counts(job: Job) -> list[int | None]:
    """The documents of each part; None for a part that is not there."""
    documents = job.documents
    return [
        None if part is None else len(part.lengths)
        for part in (documents.train, documents.valid, documents.test)
    ]


@pytest.mark.parametrize(
    ("flags", "expected", "eval_iters"),
    [
        ("--data-path many", [97, 3, None], 100),
        ("--data-path few", [12, None, None], 0),
        ("--data-path few --split 6,3,3 --eval-iters 5", [6, 3, 3], 5),
        ("--data-path few --split 6,3,3 --eval-iters 0", [6, None, None], 0),
        ("--data-path few --split 1,0,1", [6, None, None], 0),
        ("--data-path few --split 6,3,3 --skip-train", [None, 3, 3], 100),
        ("--data-path many few --split 8,1,1", [90, 11, 11], 100),
        ("--data-path 1 many 0 three --split 8,1,1 --full-validation", [82, 11, 10], 100),
        ("--train-data-path many", [100, None, None], 0),
        ("--train-data-path many --valid-data-path 1 few 2 three", [100, 15, None], 100),
        ("--train-data-path many --valid-data-path few --test-data-path three", [100, 12, 3], 100),
        ("--mock-data", [33333, 33334, 33333], 100),
        ("--mock-data --split 9,1 --dataloader-type cyclic", [90000, 10000, None], 100),
    ],
)
def test_every_part_gets_its_documents(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    expected: list[int | None],
    eval_iters: int,
) -> None:
    job = job_of(monkeypatch, flags)
    assert counts(job) == expected
    assert job.args.eval_iters == eval_iters
    evaluates_nothing = "--eval-iters 0" not in flags and not eval_iters
    assert any("no evaluation: " in notice for notice in job.documents.notices) == evaluates_nothing


def test_the_first_lines_say_what_came_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(monkeypatch, "--data-path 30 many 10 few --split 99,1,0")
    assert job.documents.notices == (
        "documents: 111 to train on (75% many, 25% few), 1 to validate on (100% many, 0% few)",
        "evaluating without few: the split leaves no document of 1 to 512 tokens",
    )
    assert job_of(monkeypatch, "--data-path three").documents.notices == (
        "documents: 3 to train on",
        "no evaluation: --split 969, 30, 1 leaves no document of 1 to 512 tokens for the part "
        "valid",
    )
    assert job_of(monkeypatch, "--train-data-path three").documents.notices[1:] == (
        "no evaluation: there is no --valid-data-path",
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-path few --split 0,1", "there is nothing to train on: --split 0,1 leaves no doc"),
        ("--data-path few --skip-train", "there is nothing to evaluate: --split 969, 30, 1 leaves"),
        (
            "--data-path three --split 1 --full-validation",
            "there is nothing to evaluate: --split 1",
        ),
        ("--valid-data-path few", "there is nothing to train on: there is no --train-data-path"),
        ("--data-path three --split 1,9", "--data-path holds no document to train on: 0 documents"),
        (
            "--data-path 3 many 1 long",
            "--data-path long has the weight 1, but no document of 1 to 512 tokens to train on",
        ),
        (
            "--train-data-path many --valid-data-path 1 long",
            "--valid-data-path holds no document to train on: 2 documents, none with 1 to 512",
        ),
        ("--data-path 1 many 2 nowhere", "--data-path nowhere: there is no file nowhere.bin"),
        ("--data-args-path nowhere", "--data-args-path nowhere cannot be read: "),
        ("--data-path many few many", "--data-path names many twice"),
    ],
)
def test_what_a_run_needs_and_does_not_get_is_said_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        job_of(monkeypatch, flags)
    assert str(caught.value).startswith(message)
