"""Megatron's help texts, read once a process instead of once a parser.

Megatron takes the help text of a flag from its own sources, which it parses anew for every parser:
three times a run, which is more work than a short run's training. The texts are a function of the
class alone.
"""

import argparse
from functools import cache

import pytest


def read_help_texts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads all of them now; parsers take them from memory until the monkeypatch is undone."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read, factory = ArgumentGroupFactory._get_field_docstrings, object.__new__(ArgumentGroupFactory)

    @cache
    def texts(config_class: type) -> dict[str, str]:
        return read(factory, config_class)

    def remembered(_: ArgumentGroupFactory, config_class: type) -> dict[str, str]:
        return dict(texts(config_class))

    monkeypatch.setattr(ArgumentGroupFactory, "_get_field_docstrings", remembered)
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
