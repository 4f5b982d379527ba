"""The settings: every field documented, the flags frozen."""

import subprocess
import sys
from dataclasses import fields

import pytest

from megatron_nsp.config import NSPConfig, build_tree, flag, is_admissible

FLAGS = {
    "--nsp-max-degree",
    "--nsp-degrees",
    "--nsp-batch-tokens",
    "--nsp-max-length",
    "--nsp-over-long",
    "--nsp-token-budget",
    "--nsp-save-budget-gb",
    "--nsp-profile",
    "--nsp-policy",
    "--nsp-plan-ahead",
    "--nsp-input-layout",
    "--nsp-overlap",
    "--nsp-kernel",
    "--nsp-record-plans",
    "--nsp-cpu",
}


def test_the_flags_are_frozen_and_few() -> None:
    """A new flag is a decision: change this list with its documentation in README.md."""
    assert {flag(field.name) for field in fields(NSPConfig)} == FLAGS
    assert len(FLAGS) <= 20


def test_b2_inadmissible_degrees_are_never_offered() -> None:
    assert [d for d in (1, 2, 4, 7, 8, 14, 28) if is_admissible(d, 28, 7)] == [1, 7, 14, 28]
    assert build_tree(NSPConfig(), 8, 28, 7).degrees == (1,)
    assert build_tree(NSPConfig(), 8, 12, 12).degrees == (1, 2, 4)
    assert build_tree(NSPConfig(), 8, 8, 1).degrees == (1, 2, 4, 8)
    with pytest.raises(ValueError, match="degree 2 cannot split 28 query and 7 key/value"):
        build_tree(NSPConfig(max_degree=8), 8, 28, 7)


def test_defaults_are_valid() -> None:
    NSPConfig().validate()


def test_flags_round_trip_through_a_parser() -> None:
    """In a process of its own: the parser's module belongs to the Megatron levels."""
    code = (
        "import argparse\n"
        "from megatron_nsp.mcore.args import add_nsp_args, config_from_args, field_docs\n"
        "parser = add_nsp_args(argparse.ArgumentParser())\n"
        "text = '--nsp-degrees 1,3,6 --no-nsp-overlap --nsp-cpu --nsp-token-budget 5'\n"
        "text += ' --nsp-save-budget-gb inf'\n"
        "config = config_from_args(parser.parse_args(text.split()))\n"
        "assert config.degrees == (1, 3, 6) and not config.overlap and config.cpu\n"
        "assert config.save_budget_gb == float('inf')\n"
        "assert config.token_budget == 5 and config_from_args(parser.parse_args([])).overlap\n"
        "assert all(len(text) > 20 for text in field_docs().values())\n"
        f"assert len(field_docs()) == {len(FLAGS)}\n"
        "parser.format_help()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
