"""The settings: every field documented, the flags frozen."""

import subprocess
import sys
from dataclasses import fields

import pytest

from megatron_nsp.config import NSPConfig, build_tree, flag
from megatron_nsp.plan.heads import is_admissible

FLAGS = {
    "--nsp-max-degree",
    "--nsp-degrees",
    "--nsp-backend",
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
    "--nsp-check",
}


def test_the_flags_are_frozen_and_few() -> None:
    """A new flag is a decision: change this list with its documentation in README.md."""
    assert {flag(field.name) for field in fields(NSPConfig)} == FLAGS
    assert len(FLAGS) <= 20


def test_b2_inadmissible_degrees_are_never_offered() -> None:
    assert [d for d in (1, 2, 4, 7, 8, 14, 28) if is_admissible(d, 28, 7)] == [1, 7, 14, 28]
    heads_alone = NSPConfig(backend="ulysses")
    assert build_tree(heads_alone, 8, 28, 7).degrees == (1,)
    assert build_tree(heads_alone, 8, 12, 12).degrees == (1, 2, 4)
    assert build_tree(heads_alone, 8, 8, 1).degrees == (1, 2, 4, 8)
    with pytest.raises(ValueError, match="degree 2 cannot split 28 query and 7 key/value"):
        build_tree(NSPConfig(max_degree=8, backend="ulysses"), 8, 28, 7)


def test_te_a2a_has_degrees_that_divide_all_heads() -> None:
    assert build_tree(NSPConfig(backend="te-a2a"), 16, 8, 2).degrees == (1, 2)
    assert build_tree(NSPConfig(backend="ulysses"), 16, 8, 2).degrees == (1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"degree 4 cannot split 8 query and 2 .* te-a2a must"):
        build_tree(NSPConfig(max_degree=4, backend="te-a2a"), 16, 8, 2)


@pytest.mark.parametrize("backend", ["auto", "ring", "usp", "gather", "te-p2p"])
def test_where_tokens_may_be_split_heads_limit_no_degree(backend: str) -> None:
    config = NSPConfig(backend=backend)
    assert build_tree(config, 8, 28, 7).max_degree == build_tree(config, 8, 5, 5).max_degree == 8
    assert build_tree(config, 1024, 8, 8).max_degree == 64
    assert build_tree(config, 1024, 128, 128).max_degree == 128  # as with heads alone
    assert build_tree(NSPConfig(max_degree=16, backend=backend), 16, 8, 8).max_degree == 16
    with pytest.raises(ValueError, match="--nsp-max-degree: degree 16 does not divide the 8"):
        build_tree(NSPConfig(max_degree=16, backend=backend), 8, 8, 8)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--nsp-backend must be one of auto, .*, got rings"):
        NSPConfig(backend="rings").validate()


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
