"""In which order documents are drawn: each data set in random order, once an epoch of its own.

Without weights all documents are one data set. With weights every data set has its share of the
documents that are trained on. The next document comes from the data set that is furthest behind its
share of the n documents drawn so far, which is Megatron's rule for blends:

    weights 1, 3      B A B B  A B B B  A B B B ...      A lacks n / 4 minus those drawn, B 3 n / 4

The order depends on lengths, seed and weights alone, and a run that resumes draws it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from megatron_nsp.plan.arrays import BoolArray, IntArray


def document_order(num_documents: int, seed: int, epoch: int, data_set: int = 0) -> IntArray:
    """`[num_documents]` the order of an epoch; the same on every rank and machine."""
    # SeedSequence fills up with zeros: data set 0 of a blend has the order of one without weights.
    return np.random.default_rng([seed, epoch, data_set]).permutation(num_documents)


@dataclass(frozen=True, eq=False)
class Blend:
    """Data sets that are drawn in shares.

    Attributes:
        bounds: `[k + 1]` first document of each data set, and the number of all documents.
        weights: `[k]` shares, not negative; they need not add up to 1.
    """

    bounds: Sequence[int]
    weights: Sequence[float]


class DocumentDraw(Protocol):
    """An endless draw of documents.

    Attributes:
        epoch: how often the data set of the document drawn last had been drawn whole before.
    """

    epoch: int

    def next(self) -> int:
        """The next document."""


class DataSetDraw:
    """The documents of one data set, epoch after epoch.

    Args:
        first: its first document.
        num_documents: how many it has, at least one.
        seed: seed of the order.
        data_set: its place among the data sets.
    """

    def __init__(self, first: int, num_documents: int, seed: int, data_set: int = 0) -> None:
        """Starts at the first document of epoch 0."""
        assert num_documents > 0, f"data set {data_set} is empty"
        self.epoch = 0
        self._first, self._num_documents = first, num_documents
        self._seed, self._data_set = seed, data_set
        self._order = document_order(num_documents, seed, 0, data_set)
        self._next = 0

    def next(self) -> int:
        """The next document."""
        if self._next == self._num_documents:
            self.epoch += 1
            self._order = document_order(
                self._num_documents, self._seed, self.epoch, self._data_set
            )
            self._next = 0
        self._next += 1
        return self._first + int(self._order[self._next - 1])


class BlendDraw:
    """The documents of several data sets, each as often as its weight says.

    A document that cannot be trained on is passed over where it is drawn and counts for nothing:
    the same data set is still behind, and is drawn again.

    Args:
        blend: the data sets.
        is_usable: `[documents]` whether a document can be trained on; in every data set with a
            weight one must.
        seed: seed of the orders.
    """

    def __init__(self, blend: Blend, is_usable: BoolArray, seed: int) -> None:
        """Starts at the first document of every data set."""
        self.epoch = 0
        weights = np.array(blend.weights, dtype=np.float64)
        (drawn,) = weights.nonzero()
        bounds = list(pairwise(blend.bounds))
        for place in drawn.tolist():
            first, end = bounds[place]
            assert is_usable[first:end].any(), f"data set {place} would be drawn for ever"
        self._data_sets = [
            DataSetDraw(bounds[place][0], bounds[place][1] - bounds[place][0], seed, place)
            for place in drawn.tolist()
        ]
        self._shares = (weights / weights.sum())[drawn]
        self._num_drawn = np.zeros(len(drawn), dtype=np.int64)
        self._total = 0
        self._is_usable = is_usable

    def next(self) -> int:
        """The next document."""
        behind = self._shares * max(self._total, 1) - self._num_drawn
        place = int(behind.argmax())
        document = self._data_sets[place].next()
        self.epoch = self._data_sets[place].epoch
        if self._is_usable[document]:
            self._num_drawn[place] += 1
            self._total += 1
        return document
