"""The table of flags against the parser, the table of refusals, and its page."""

import argparse
from collections import Counter

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_nsp.mcore.flags import FLAGS, Fate, flags_of, without_effect
from megatron_nsp.mcore.flags_page import with_flags
from megatron_nsp.mcore.pretrain import add_args
from megatron_nsp.mcore.refusals import all_refusals
from megatron_nsp.mcore.replacements import REPLACEMENTS
from tests.mcore.launch import ROOT

pytestmark = pytest.mark.usefixtures("help_texts")

TABLE = [flag for groups in FLAGS.values() for group in groups for flag in group.names]


def test_every_spelling_of_every_flag_stands_in_the_table_once() -> None:
    parser = add_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    spellings = {flag for action in parser._actions for flag in action.option_strings}
    assert [flag for flag, count in Counter(TABLE).items() if count > 1] == []
    missing, unknown = spellings - set(TABLE) - {"-h", "--help"}, set(TABLE) - spellings
    assert (missing, unknown) == (set(), set()), (
        "new in Megatron's parser, or gone: read what the flag does, then change flags.py"
    )
    assert {flag for flag in spellings if "nsp-" in flag} == set(flags_of(Fate.OURS))


def test_a_flag_is_refused_where_a_row_says_so() -> None:
    rows = {row.flag for row in all_refusals()}
    assert set(flags_of(Fate.REFUSED)) - rows == set()
    assert rows - set(TABLE) == set()


def test_a_flag_is_replaced_where_a_row_says_so() -> None:
    """Or refused, until it is."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {action.dest: action.option_strings[0] for action in parser._actions}
    set_by_rows = {flags[name] for row in REPLACEMENTS for name in row.values if name in flags}
    replaced = {row.flag for row in REPLACEMENTS}
    known = replaced | set_by_rows | {row.flag for row in all_refusals()}
    assert set(flags_of(Fate.REPLACED)) - known == set()
    assert replaced - set(TABLE) == set()


def test_what_has_no_effect_is_named_once_as_it_is_typed() -> None:
    default = "--attention-dropout 0.1 (the default)"
    line = "--num-workers 4 --bf16 --num-workers=2 --data-path a --data-cache-path=b"
    named = f"without effect: --num-workers, --data-cache-path, {default}"
    assert without_effect(line.split()) == [named]
    assert without_effect(["--bf16"]) == [f"without effect: {default}"]
    assert without_effect(["--bf16", "--attention-dropout", "0"]) == []


def test_the_page_is_written_from_the_table() -> None:
    page = (ROOT / "docs" / "flags.md").read_text()
    assert with_flags(page) == page, "run python -m megatron_nsp.mcore.flags_page docs/flags.md"
