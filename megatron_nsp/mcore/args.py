"""Command-line flags, generated from NSPConfig: field `x_y` becomes `--nsp-x-y`."""

import argparse
import ast
import inspect
import re
from dataclasses import Field, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from megatron_nsp.config import NSPConfig, flag


@cache
def field_docs() -> dict[str, str]:
    """The string below each field of NSPConfig, on one line."""
    tree = ast.parse(inspect.getsource(NSPConfig)).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(node.target, ast.Name)
            docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers with commas, got {text}") from None


def add_nsp_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds every field of NSPConfig as a flag to Megatron's parser and returns the parser.

    A parser that has the flags stays as it is: Megatron patched with `patches/` adds them.
    """
    if parser.get_default(_destination("policy")) is not None:
        return parser
    group = parser.add_argument_group("nested sequence parallelism")
    hints, docs = get_type_hints(NSPConfig), field_docs()
    for field in fields(NSPConfig):
        group.add_argument(
            flag(field.name) if field.default is not True else "--no-" + flag(field.name)[2:],
            dest=_destination(field.name),
            default=field.default,
            help=docs[field.name].replace("%", "%%"),
            **_argument(field, hints[field.name]),
        )
    return parser


def escape_help(parser: argparse.ArgumentParser) -> None:
    """Escapes a bare % in help texts, of which Megatron has one: `--help` would fail on it."""
    for action in parser._actions:
        action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)


def _argument(field: "Field[Any]", hint: Any) -> dict[str, Any]:
    if hint is bool:
        return {"action": "store_false" if field.default else "store_true"}
    if hint == tuple[int, ...] | None:
        return {"type": _integers, "metavar": "1,D,..."}
    optional = {"nargs": "?", "const": field.metadata["const"]} if field.metadata else {}
    (type_,) = [t for t in (get_args(hint) or (hint,)) if t is not type(None)]
    return {"type": type_} | optional


def _destination(field_name: str) -> str:
    return "nsp_" + field_name


def config_from_args(args: argparse.Namespace) -> NSPConfig:
    """The NSPConfig of parsed flags."""
    values = {field.name: getattr(args, _destination(field.name)) for field in fields(NSPConfig)}
    return NSPConfig(**values)


def changed_flags(args: argparse.Namespace) -> list[str]:
    """The flags whose parsed value is not the default; none if the parser did not have them."""
    return [
        flag(field.name)
        for field in fields(NSPConfig)
        if getattr(args, _destination(field.name), field.default) != field.default
    ]
