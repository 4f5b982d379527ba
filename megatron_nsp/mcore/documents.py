"""The training documents: Megatron IndexedDatasets (.bin/.idx), read slice by slice.

Documents are numbered through all given datasets in order. A rank reads only the tokens it holds.
"""

import copy
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_nsp.mcore.data_paths import DataPath, Share
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.steps.draw import Blend
from megatron_nsp.steps.lengths import are_bounds


class Documents(Protocol):
    """Documents that a run trains or evaluates on.

    Attributes:
        flag: the flag that gave them, for errors.
        names: the data sets they are from.
        lengths: `[documents]` tokens of each.
        blend: how the data sets are drawn, where they have weights.
    """

    flag: str
    names: Sequence[str]
    lengths: IntArray
    blend: Blend | None

    def read(self, document: int, start: int, stop: int) -> IntArray:
        """Tokens [start, stop) of a document."""

    def name_of(self, document: int) -> str:
        """What a document is called in errors: its data set and its number there."""

    def part(self, share: Share) -> "Documents":
        """The documents of a share of every data set, numbered from 0."""

    def with_vocabulary(self, vocabulary: int) -> "Documents":
        """The same, once it is known how many different tokens there are."""


def cut(num_documents: int, share: Share) -> tuple[int, int]:
    """The first document of a share and the one after its last, as Megatron rounds them."""
    first, end = (round(point * float(num_documents)) for point in share)
    return first, end


class IndexedDocuments:
    """The documents of one or more datasets.

    Args:
        path: the datasets.
        mmap: whether tokens are memory-mapped, or read from the file.

    Raises:
        ValueError: a dataset does not exist or is damaged.
    """

    def __init__(self, path: DataPath, mmap: bool = True) -> None:
        """Opens the datasets and reads their indices."""
        self.flag = path.flag
        self.names: Sequence[str] = path.prefixes
        for prefix in path.prefixes:
            for file in (prefix + ".bin", prefix + ".idx"):
                if not os.path.isfile(file):
                    raise ValueError(f"{self.flag} {prefix}: there is no file {file}")
            if os.path.getsize(prefix + ".bin") == 0:  # cannot be memory-mapped
                raise ValueError(f"{self.flag} {prefix} holds no document to train on: 0 tokens")
        self._weights = path.weights
        self._datasets = [_open(prefix, self.flag, mmap) for prefix in path.prefixes]
        self._vocabulary: int | None = None
        # For each dataset the number of its first document here, in its file.
        self._first_in_file = [0] * len(self._datasets)
        self._hold([np.asarray(data.document_indices, np.int64) for data in self._datasets])

    def _hold(self, bounds: Sequence[IntArray]) -> None:
        """Holds other documents: for each dataset `[documents + 1]` the first sequence of each."""
        self._bounds = bounds
        self.lengths: IntArray = np.concatenate(list(map(_lengths, self._datasets, bounds)))
        counts = [len(dataset_bounds) - 1 for dataset_bounds in bounds]
        self._first_document = np.concatenate([[0], np.cumsum(counts)])
        bounds_of_sets = self._first_document.tolist()
        self.blend = Blend(bounds_of_sets, self._weights) if self._weights else None

    def part(self, share: Share) -> "IndexedDocuments":
        """The documents of a share of every data set, numbered from 0."""
        part = copy.copy(self)
        ends = [cut(len(bounds) - 1, share) for bounds in self._bounds]
        part._first_in_file = [first for first, _ in ends]
        part._hold(
            [
                bounds[first : end + 1]
                for bounds, (first, end) in zip(self._bounds, ends, strict=True)
            ]
        )
        return part

    def with_vocabulary(self, vocabulary: int) -> "IndexedDocuments":
        """The same, whose tokens are compared with the vocabulary where they are read."""
        checked = copy.copy(self)
        checked._vocabulary = vocabulary
        return checked

    def name_of(self, document: int) -> str:
        """What a document is called in errors: its data set and its number there."""
        which, place = self._find(document)
        number = self._first_in_file[which] + place
        return f"document {number} of {self.flag} {self.names[which]}"

    def _find(self, document: int) -> tuple[int, int]:
        """The data set of a document, and its place among those of the data set that are here."""
        which = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return which, document - int(self._first_document[which])

    def read(self, document: int, start: int, stop: int) -> IntArray:
        """Tokens [start, stop) of a document.

        Raises:
            ValueError: the vocabulary does not have one of them.
        """
        which, place = self._find(document)
        data, bounds = self._datasets[which], self._bounds[which]
        parts, offset = [], 0
        for sequence in range(bounds[place], bounds[place + 1]):
            length = int(data.sequence_lengths[sequence])
            low, high = max(start - offset, 0), min(stop - offset, length)
            if low < high:
                parts.append(data.get(sequence, offset=low, length=high - low))
            offset += length
        tokens: IntArray = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        if self._vocabulary is not None:
            for bad in np.flatnonzero((tokens < 0) | (tokens >= self._vocabulary))[:1].tolist():
                raise ValueError(
                    f"{self.name_of(document)} has token {tokens[bad]} at place {start + bad}, the "
                    f"vocabulary ends at {self._vocabulary - 1}"
                )
        return tokens


def _open(prefix: str, flag: str, mmap: bool) -> IndexedDataset:
    try:
        data = IndexedDataset(prefix, mmap=mmap)
    except OSError as error:
        raise ValueError(f"{flag} {prefix} cannot be read: {error}") from error
    except (AssertionError, ValueError) as error:  # Megatron asserts what it reads
        raise ValueError(
            f"{flag} {prefix}: {prefix}.idx is not the index of a Megatron IndexedDataset ({error})"
        ) from error
    bounds = np.asarray(data.document_indices, np.int64)
    num_sequences = len(data.sequence_lengths)
    if not are_bounds(bounds, num_sequences):
        raise ValueError(
            f"{flag} {prefix}: documents of {prefix}.idx reach outside its {num_sequences} "
            "sequences"
        )
    needed = int(data.sequence_lengths.sum(dtype=np.int64)) * data.index.dtype_size
    present = os.path.getsize(prefix + ".bin")
    if present < needed:
        raise ValueError(
            f"{flag} {prefix}: {prefix}.bin is cut short: {present} bytes, {needed} expected"
        )
    return data


def _lengths(data: IndexedDataset, bounds: IntArray) -> IntArray:
    ends = np.concatenate([[0], np.cumsum(data.sequence_lengths, dtype=np.int64)])
    return np.diff(ends[bounds])
