"""The documents of a run: what it trains on, what it validates on and what it tests on.

A part that `--split` leaves without a document is no error where it is only for evaluation:
Megatron evaluates by default, and its default split leaves small data sets nothing to evaluate on.
The first lines of a run say what each part holds and what is not evaluated.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from megatron_nsp.mcore.data_paths import PART_NAMES, WHOLE, DataPath, Part, parts, split_of
from megatron_nsp.mcore.documents import Documents, IndexedDocuments
from megatron_nsp.mcore.mock_documents import MockDocuments
from megatron_nsp.mcore.sizes import longest_sample
from megatron_nsp.plan.arrays import BoolArray


@dataclass(frozen=True, eq=False)
class JobDocuments:
    """The documents of a run.

    Attributes:
        train: those to train on, if the run trains.
        valid: those to validate on, if the run evaluates.
        test: those to test on after training, if there are any.
        evaluates_all: whether each validation goes over all documents.
        notices: what a user is told of them, a line each.
    """

    train: Documents | None
    valid: Documents | None
    test: Documents | None
    evaluates_all: bool
    notices: tuple[str, ...]

    @classmethod
    def open(cls, args: argparse.Namespace) -> "JobDocuments":
        """Opens what the flags name and the run needs.

        Raises:
            ValueError: a data set does not exist or is damaged, or a part that the run needs holds
                no document.
        """
        max_length = longest_sample(args)
        assert max_length is not None, "--seq-length is checked"

        @cache
        def open_whole(path: DataPath) -> Documents:
            if args.mock_data:
                return MockDocuments(args.seed, max_length)
            return IndexedDocuments(path, args.mmap_bin_files)

        def open_part(part: Part) -> Documents:
            return open_whole(part.path).part(part.share)

        train_part, valid_part, test_part = parts(args)
        train = None
        if not args.skip_train:
            if train_part is None:
                missing = _missing(args, "train", max_length)
                raise ValueError(f"there is nothing to train on: {missing}")
            train = open_part(train_part)
            _check_train(train, max_length)
        if not (args.eval_iters or args.full_validation):
            return cls(train, None, None, False, (_counts(train, None, None),))
        valid, test = (
            part and _for_evaluation(part, open_part(part), max_length)
            for part in (valid_part, test_part)
        )
        if valid is None:
            missing = _missing(args, "valid", max_length)
            if args.skip_train or args.full_validation:
                raise ValueError(f"there is nothing to evaluate: {missing}")
            counts = _counts(train, None, None)
            return cls(train, None, None, False, (counts, f"no evaluation: {missing}"))
        notices = [
            notice
            for documents in (valid, test)
            if documents is not None
            for notice in _without_empty_sets(documents, max_length)
        ]
        counts = _counts(train, valid, test)
        return cls(train, valid, test, args.full_validation, (counts, *notices))

    def set_arguments(self, args: argparse.Namespace) -> None:
        """Sets what Megatron is to know of evaluation: how many steps of ours it has.

        With `--full-validation` that is known when the documents are planned. Megatron 0.19 itself
        would take the number of steps for a list of them, and fail.
        """
        args.full_validation = False
        if self.valid is None:
            args.eval_iters = 0
        if args.skip_train and args.train_iters is None and args.train_samples is None:
            args.train_iters = 1  # Megatron multiplies by it before it trains nothing

    def __iter__(self) -> Iterator[Documents]:
        """All that are open."""
        yield from filter(None, (self.train, self.valid, self.test))


def _missing(args: argparse.Namespace, name: str, max_length: int) -> str:
    """Why a part holds nothing."""
    if args.per_split_data_args_path is not None:
        return f"--per-split-data-args-path {args.per_split_data_args_path} has no list {name}"
    if any(getattr(args, f"{each}_data_path") is not None for each in PART_NAMES):
        return f"there is no --{name}-data-path"
    return (
        f"--split {split_of(args)} leaves no document of 1 to {max_length} tokens for the part "
        f"{name}"
    )


def _usable(documents: Documents, max_length: int) -> BoolArray:
    usable: BoolArray = (documents.lengths > 0) & (documents.lengths <= max_length)
    return usable


def _for_evaluation(part: Part, documents: Documents, max_length: int) -> Documents | None:
    """The documents of an evaluation part; None where a split leaves nothing to use.

    Data sets given for the part alone are checked with all others.
    """
    can_use = part.share == WHOLE or bool(_usable(documents, max_length).any())
    return documents if can_use else None


def _empty_sets(documents: Documents, max_length: int) -> list[int]:
    """The data sets with a weight of which no document can be used."""
    blend = documents.blend
    if blend is None:
        return []
    usable = _usable(documents, max_length)
    return [
        place
        for place, weight in enumerate(blend.weights)
        if weight and not usable[blend.bounds[place] : blend.bounds[place + 1]].any()
    ]


def _check_train(documents: Documents, max_length: int) -> None:
    for place in _empty_sets(documents, max_length):
        assert documents.blend is not None
        raise ValueError(
            f"{documents.flag} {documents.names[place]} has the weight "
            f"{documents.blend.weights[place]:g}, but no document of 1 to {max_length} tokens to "
            "train on"
        )


def _without_empty_sets(documents: Documents, max_length: int) -> list[str]:
    """Takes the weight from data sets of which an evaluation part got no document; says so."""
    empty, blend = _empty_sets(documents, max_length), documents.blend
    if blend is None or not empty or len(empty) == sum(map(bool, blend.weights)):
        return []  # where all are empty the part is refused
    weights = [0.0 if place in empty else each for place, each in enumerate(blend.weights)]
    documents.blend = replace(blend, weights=weights)
    names = ", ".join(documents.names[place] for place in empty)
    return [f"evaluating without {names}: the split leaves no document of 1 to {max_length} tokens"]


def _counts(train: Documents | None, valid: Documents | None, test: Documents | None) -> str:
    """How many documents each part has, and the shares of blended data sets."""
    counts = []
    for what, documents in (("train", train), ("validate", valid), ("test", test)):
        if documents is not None:
            counts.append(f"{len(documents.lengths)} to {what} on{_shares(documents)}")
    return f"documents: {', '.join(counts)}"


def _shares(documents: Documents) -> str:
    if documents.blend is None:
        return ""
    total = sum(documents.blend.weights)
    shares = (
        f"{100 * weight / total:.4g}% {name}"
        for name, weight in zip(documents.names, documents.blend.weights, strict=True)
    )
    return f" ({', '.join(shares)})"
