"""The table of refusals: a command line for every row, Megatron's own flags, and the page."""

import argparse
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.training.arguments import add_megatron_arguments, parse_args

from megatron_nsp.mcore.limits_page import with_refusals
from megatron_nsp.mcore.pretrain import add_args
from megatron_nsp.mcore.refusal import DERIVED, Refusal, Values, arguments_of
from megatron_nsp.mcore.refusals import all_refusals, check_arguments
from tests.mcore.command_line import parse
from tests.mcore.launch import MODEL, ROOT
from tests.mcore.refusal_examples import EXAMPLES, Example

pytestmark = pytest.mark.usefixtures("help_texts")

ROWS = tuple(all_refusals())


def pattern(row: Refusal) -> re.Pattern[str]:
    """Every message that a row can give."""
    parts = re.split(r"{[^}]*}", row.message)
    return re.compile(".+".join(map(re.escape, parts)))


def command_line(example: Example, prefix: Path) -> list[str]:
    """The flags of an example."""
    flags = " ".join(MODEL)
    if example.without:
        assert f"{example.without} " in flags
        flags = flags.replace(f"{example.without} ", "")
    data = ["--data-path", str(prefix)] if example.has_data else []
    return [*flags.split(), *data, *example.flags.split()]


@pytest.fixture(autouse=True)
def no_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are those of a machine without Transformer Engine and Apex."""
    for name in ("HAVE_TE", "HAVE_APEX"):
        monkeypatch.setattr(f"megatron_nsp.mcore.refusals.{name}", False)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.message[:60])
def test_each_example_is_refused_word_by_word(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, example: Example
) -> None:
    if not example.sets_cpu_defaults:
        monkeypatch.setattr("megatron_nsp.mcore.pretrain.set_cpu_defaults", lambda parser: None)
    if example.kernel is not None:
        kernel = SimpleNamespace(name=example.kernel, returns_lse=False)
        monkeypatch.setattr("megatron_nsp.mcore.job.choose_kernel", lambda *_: kernel)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        parse(monkeypatch, command_line(example, prefix))
    assert str(caught.value) == example.message


def test_every_row_has_an_example_and_every_example_one_row() -> None:
    found = [[row for row in ROWS if pattern(row).fullmatch(each.message)] for each in EXAMPLES]
    assert [
        each.message for each, rows in zip(EXAMPLES, found, strict=True) if len(rows) != 1
    ] == []
    with_example = {id(row) for rows in found for row in rows}
    assert [row.message for row in ROWS if id(row) not in with_example] == []


def test_one_tensor_parallel_rank_may_ask_for_sequence_parallelism(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    """Megatron then turns it off itself."""
    flags = "--num-experts 4 --sequence-parallel --pipeline-model-parallel-size 2"
    parse(monkeypatch, [*MODEL, "--data-path", str(prefix), *flags.split()])


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, prefix: Path) -> argparse.Namespace:
    """The arguments of a job that is not refused, as Megatron's parser gives them."""
    argv = ["pretrain_nsp.py", *MODEL, "--data-path", str(prefix)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("WORLD_SIZE", "6")
    args = parse_args(add_args)
    check_arguments(args)
    return args


def test_every_flag_and_argument_that_a_row_names_is_one_of_this_megatron(
    arguments: argparse.Namespace,
) -> None:
    parser = add_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = {flag for action in parser._actions for flag in action.option_strings}
    named = {flag for row in ROWS for flag in re.findall(r"--[a-z0-9-]+", row.message)}
    assert named | {row.flag for row in ROWS} <= flags
    for row in ROWS:
        for name in row.reads:
            assert name == "kernel" or set(arguments_of(name)) <= vars(arguments).keys(), row.flag
        assert row.absent.keys() <= vars(arguments).keys()
    assert set(DERIVED) & vars(arguments).keys() == set()


def test_a_flag_that_megatron_lacks_is_an_error_and_no_check_that_passes(
    arguments: argparse.Namespace,
) -> None:
    checked = 0
    for row in ROWS:
        for argument in {a for name in row.reads if name != "kernel" for a in arguments_of(name)}:
            fewer = argparse.Namespace(**vars(arguments))
            delattr(fewer, argument)
            values = Values(fewer, kernel=SimpleNamespace(name="any", returns_lse=True))
            if argument in row.absent:
                assert row.of(values) is None
                continue
            with pytest.raises(AssertionError, match=f"no argument {argument}: {row.flag} is unch"):
                row.of(values)
            checked += 1
    assert checked > len(ROWS)


def test_what_megatron_removes_when_it_validates_is_no_missing_flag(
    arguments: argparse.Namespace,
) -> None:
    for row in ROWS:
        for name in row.absent:
            delattr(arguments, name)
    check_arguments(arguments)


def test_the_page_is_written_from_the_table() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    assert with_refusals(page) == page, (
        "run python -m megatron_nsp.mcore.limits_page docs/limits.md"
    )
    with pytest.raises(ValueError, match=r"needs the lines .* once each"):
        with_refusals(page + page)
