"""Which data sets flags name, with which weights, and which share each part of a run gets.

A run has three parts: documents to train on, to validate on and to test on. One list of data sets
is cut into three (`--data-path`, `--data-args-path`; `--split` says where), or each part has a list
of its own (`--train-data-path` and its like, `--per-split-data-args-path`).
"""

import argparse
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

Share = tuple[float, float]
"""Where a part begins and ends among the documents of every data set, from 0 to 1."""

WHOLE: Share = (0.0, 1.0)

DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's own, where `--data-path` is given without `--split`."""

MOCK_SPLIT = "1, 1, 1"
"""Megatron's own for `--mock-data`."""

PART_NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class DataPath:
    """The data sets that a flag names.

    Attributes:
        flag: the flag, for errors.
        prefixes: paths without the .bin/.idx ending.
        weights: their shares of the documents; without them all documents come once an epoch.
    """

    flag: str
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, flag: str, words: Sequence[str]) -> "DataPath":
        """Reads prefixes, or a weight before every prefix, as Megatron tells them apart.

        Raises:
            ValueError: neither of them, a weight that is none, or a data set that is named twice.
        """
        words = [word.strip() for word in words]
        if not words:
            raise ValueError(f"{flag} names no data set")
        weights, prefixes = words[::2], words[1::2]
        if len(words) % 2 == 0 and all(_is_number(word) for word in weights):
            path = cls(flag, tuple(prefixes), tuple(map(float, weights)))
        else:
            path = cls(flag, tuple(words))
            path._check_no_weights()
        path._check()
        return path

    def _check_no_weights(self) -> None:
        """Refuses a list that is neither prefixes nor weights and prefixes in turns."""
        for word in self.prefixes:
            if _is_number(word) and not os.path.isfile(word + ".idx"):
                missing = [each for each in self.prefixes[::2] if not _is_number(each)]
                reason = f"{missing[0]} is no weight" if missing else "a prefix is missing"
                raise ValueError(
                    f"{self.flag} takes prefixes, or a weight before every prefix: {reason}, and "
                    f"there is no data set {word}"
                )

    def _check(self) -> None:
        for weight, prefix in zip(self.weights or (), self.prefixes, strict=False):
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"{self.flag}: {prefix} has the weight {weight:g}, at least 0")
        if self.weights is not None and not any(self.weights):
            raise ValueError(f"{self.flag}: all {len(self.weights)} weights are 0")
        named: set[str] = set()
        for prefix in self.prefixes:
            path = os.path.realpath(prefix)
            if path in named:
                raise ValueError(f"{self.flag} names {prefix} twice")
            named.add(path)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


class Part(NamedTuple):
    """Where the documents of a part of the run come from.

    Attributes:
        path: the data sets.
        share: which of their documents.
    """

    path: DataPath
    share: Share


def is_split(split: str) -> bool:
    """Whether a `--split` is one to three shares of which the sum is above 0."""
    numbers = re.findall(r"[.0-9]+", split)
    if re.sub(r"[.0-9]+", "", split).strip(", ") or not 1 <= len(numbers) <= len(PART_NAMES):
        return False
    return all(map(_is_number, numbers)) and any(map(float, numbers))


def split_shares(split: str) -> list[Share | None]:
    """The shares of train, valid and test, exactly as Megatron cuts them; None is an empty one."""
    shares: list[Share | None] = convert_split_vector_to_split_matrix(
        parse_and_normalize_split(split)
    )
    return shares


def split_of(args: argparse.Namespace) -> str:
    """The split of a job whose parts are cut from one list."""
    return args.split or (MOCK_SPLIT if args.mock_data else DEFAULT_SPLIT)


def parts(args: argparse.Namespace) -> list[Part | None]:
    """Where train, valid and test documents come from; None where flags name none.

    Args:
        args: checked arguments; one flag names data.

    Raises:
        ValueError: a file of a list cannot be read, or a list is none.
    """
    if args.mock_data or args.data_path is not None or args.data_args_path is not None:
        path = DataPath("--mock-data", ()) if args.mock_data else _one_path(args)
        return [share and Part(path, share) for share in split_shares(split_of(args))]
    if args.per_split_data_args_path is not None:
        lists = _read_lists(args.per_split_data_args_path)
        flag = f"--per-split-data-args-path {args.per_split_data_args_path}"
        paths = {name: (f"{flag}, {name}", lists[name]) for name in PART_NAMES}
    else:
        paths = {
            name: (f"--{name}-data-path", getattr(args, f"{name}_data_path")) for name in PART_NAMES
        }
    return [
        None if words is None else Part(DataPath.parse(flag, words), WHOLE)
        for flag, words in paths.values()
    ]


def _one_path(args: argparse.Namespace) -> DataPath:
    if args.data_args_path is None:
        return DataPath.parse("--data-path", args.data_path)
    flag = f"--data-args-path {args.data_args_path}"
    return DataPath.parse(flag, _read_text(flag, args.data_args_path).split())


def _read_lists(path: str) -> Mapping[str, Sequence[str] | None]:
    """The lists of a JSON file with the keys train, valid and test; a text is a list of words."""
    flag = f"--per-split-data-args-path {path}"
    try:
        content = json.loads(_read_text(flag, path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is not JSON: {error}") from error
    if not isinstance(content, dict) or not content.keys() >= set(PART_NAMES):
        raise ValueError(f"{flag} needs the keys {', '.join(PART_NAMES)}")
    lists = {name: content[name] for name in PART_NAMES}
    for name, words in lists.items():
        if isinstance(words, str):
            lists[name] = words.split()
        elif words is not None and not (
            isinstance(words, list) and all(isinstance(word, str) for word in words)
        ):
            raise ValueError(f"{flag}: {name} is no list of prefixes and weights")
    return lists


def _read_text(flag: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} cannot be read: {error}") from error
