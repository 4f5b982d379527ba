"""The training documents: Megatron IndexedDatasets (.bin/.idx), read slice by slice.

Documents are numbered through all given datasets in order. A rank reads only the tokens it holds.
"""

import os
from collections.abc import Sequence

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.steps.lengths import are_bounds


class Documents:
    """The documents of one or more datasets.

    Args:
        prefixes: paths without the .bin/.idx ending.
        flag: the flag that gave them, for errors.

    Raises:
        ValueError: a dataset does not exist or is damaged.
    """

    def __init__(self, prefixes: Sequence[str], flag: str = "--data-path") -> None:
        """Opens the datasets memory-mapped and reads their indices."""
        self.flag = flag
        for prefix in prefixes:
            for path in (prefix + ".bin", prefix + ".idx"):
                if not os.path.isfile(path):
                    raise ValueError(f"{flag} {prefix}: there is no file {path}")
            if os.path.getsize(prefix + ".bin") == 0:  # cannot be memory-mapped
                raise ValueError(f"{flag} {prefix} holds no document to train on: 0 tokens")
        self._datasets = [_open(prefix, flag) for prefix in prefixes]
        # For each dataset [documents + 1]: the first sequence of each document.
        self._bounds = [np.asarray(data.document_indices, np.int64) for data in self._datasets]
        per_dataset = map(_lengths, self._datasets, self._bounds)
        self.lengths: IntArray = np.concatenate(list(per_dataset))
        counts = [len(bounds) - 1 for bounds in self._bounds]
        self._first_document = np.concatenate([[0], np.cumsum(counts)])

    def read(self, document: int, start: int, stop: int) -> IntArray:
        """Tokens [start, stop) of a document."""
        which = int(np.searchsorted(self._first_document, document, side="right")) - 1
        data, bounds = self._datasets[which], self._bounds[which]
        place = document - int(self._first_document[which])
        parts, offset = [], 0
        for sequence in range(bounds[place], bounds[place + 1]):
            length = int(data.sequence_lengths[sequence])
            low, high = max(start - offset, 0), min(stop - offset, length)
            if low < high:
                parts.append(data.get(sequence, offset=low, length=high - low))
            offset += length
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _open(prefix: str, flag: str) -> IndexedDataset:
    try:
        data = IndexedDataset(prefix, mmap=True)
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
