"""Whatever Megatron raises while it looks at flags, as one line that names them where it can.

Megatron refuses flags by assertions with and without words, by errors of many kinds, and once by
an exit without an error. What is raised says which flags it is about in words, or by the arguments
that the raising statement and the `if` around it look at.
"""

import argparse
import ast
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import megatron.training.arguments
from megatron.training.arguments import add_megatron_arguments

_MEGATRON = str(Path(megatron.training.arguments.__file__).parents[1])

_SPEAKING = (ValueError, AssertionError, RuntimeError, ImportError)
"""Errors whose text stands alone; others are known by their kind as well."""

_ARGUMENT = re.compile(r"\b(?:args|self|config)\.(\w+)")
_LONG_NAME = re.compile(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b")


@contextmanager
def in_one_line(is_parsing: bool = False) -> Iterator[None]:
    """Turns whatever is raised inside into a ValueError of one line.

    Args:
        is_parsing: whether a parser is at work, which exits after `--help`.

    Raises:
        ValueError: something was raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_parsing and isinstance(error, SystemExit):
            raise
        raise ValueError(_line(error)) from error


def refuse_usage(message: str) -> NoReturn:
    """In place of `ArgumentParser.error`, which prints the usage of 800 flags first.

    Raises:
        ValueError: the message.
    """
    raise ValueError(message.removeprefix("argument "))


def one_line(error: BaseException) -> str:
    """An error's text in one line; where it has none, the place that says more."""
    if text := str(error).strip():
        return " ".join(text.split())
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"at {place.filename}:{place.lineno}: {place.line}"


def _line(error: BaseException) -> str:
    places = _places(error)
    if isinstance(error, SystemExit):
        text = "Megatron exits without an error"
    elif str(error).strip() or not places:
        text = one_line(error)
    else:
        text = f"Megatron asks for: {_statement(places[0])}"
    if not isinstance(error, (*_SPEAKING, SystemExit)):
        text = f"{type(error).__name__}: {text}"
    if "--" in text:
        return text
    flags = ", ".join(_flags(text, places))
    return f"{flags}: {text}" if flags else text


def _places(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of Megatron's that an error went through, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [each for each in reversed(frames) if each.filename.startswith(_MEGATRON)]


def _statement(place: traceback.FrameSummary) -> str:
    assert place.lineno is not None
    last = place.end_lineno or place.lineno
    lines = (linecache.getline(place.filename, line) for line in range(place.lineno, last + 1))
    return " ".join(" ".join(lines).split()).removeprefix("assert ")


def _flags(text: str, places: list[traceback.FrameSummary]) -> list[str]:
    """The flags that an error without any in its text is about."""
    known, names = _flags_by_argument(), _LONG_NAME.findall(text)
    for place in places:
        names += _ARGUMENT.findall(_condition(place)) + _ARGUMENT.findall(_statement(place))
        flags = list(dict.fromkeys(known[name] for name in names if name in known))
        if flags:
            return flags
    return []


def _condition(place: traceback.FrameSummary) -> str:
    """What the innermost `if` around a line looks at, of those that look at arguments."""
    assert place.lineno is not None
    tree = ast.parse("".join(linecache.getlines(place.filename)))
    tests = [
        (node.lineno, ast.unparse(node.test))
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and node.lineno < place.lineno <= (node.end_lineno or 0)
    ]
    return next((test for _, test in sorted(tests, reverse=True) if _ARGUMENT.search(test)), "")


@cache
def _flags_by_argument() -> Mapping[str, str]:
    """The first spelling of the flag of each argument."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags: dict[str, str] = {}
    for action in parser._actions:
        flags.setdefault(action.dest, action.option_strings[0])
    return flags
