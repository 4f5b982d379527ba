"""Which documents make up each step: a fixed order from seed and epoch, whole samples only.

A step's batch is drawn until it holds the tokens of that step. Documents that cannot be trained on
(over the longest length, or empty) are passed over where they would have been drawn, and counted in
that batch. Samples that the planner could not fit are put at the head of the next batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_nsp.plan.arrays import IntArray

_EMPTY: IntArray = np.zeros(0, dtype=np.int64)


class StepSize(NamedTuple):
    """How large a step is.

    Attributes:
        tokens: tokens at which its batch is full.
        num_micro_batches: micro-batches that its samples are divided into.
    """

    tokens: int
    num_micro_batches: int = 1


StepSizes = Callable[[int], StepSize]
"""The size of every step of a run, counted from 0."""


def always(tokens: int, num_micro_batches: int = 1) -> StepSizes:
    """Steps that are all of one size."""
    return lambda step: StepSize(tokens, num_micro_batches)


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples of one step.

    Attributes:
        documents: `[n]` document number of each sample.
        lengths: `[n]` tokens of each sample.
        num_micro_batches: micro-batches that they are divided into.
        over_long: documents passed over because they are too long.
        over_long_tokens: their tokens.
        num_empty: documents passed over because they hold no token.
        num_carried: how many samples, at the head, come from the previous step.
        epoch: the epoch of the last document drawn.
    """

    documents: IntArray
    lengths: IntArray
    num_micro_batches: int = 1
    over_long: IntArray = field(default_factory=lambda: _EMPTY)
    over_long_tokens: int = 0
    num_empty: int = 0
    num_carried: int = 0
    epoch: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())


def document_order(num_documents: int, seed: int, epoch: int) -> IntArray:
    """`[num_documents]` the order of an epoch; the same on every rank and machine."""
    return np.random.default_rng([seed, epoch]).permutation(num_documents)


class BatchSampler:
    """Draws the batches of a run, one after the other.

    Args:
        lengths: `[documents]` tokens of each document.
        size_of: the size of each step.
        max_length: longest document to train on, in tokens.
        seed: seed of the order.

    Raises:
        ValueError: no document can be trained on.
    """

    def __init__(self, lengths: IntArray, size_of: StepSizes, max_length: int, seed: int) -> None:
        """Starts at the first document of epoch 0."""
        usable = (lengths > 0) & (lengths <= max_length)
        if not usable.any():
            longest = int(lengths.max(initial=0))
            raise ValueError(
                f"none of the {len(lengths)} documents can be trained on: lengths must be 1 to "
                f"{max_length} tokens, the longest is {longest}"
            )
        self._lengths, self._max_length = lengths, max_length
        self._size_of, self._seed = size_of, seed
        self._step = 0
        self._epoch = 0
        self._order = document_order(len(lengths), seed, 0)
        self._next = 0
        self._carried = _EMPTY

    def draw(self) -> Batch:
        """The next batch."""
        size, self._step = self._size_of(self._step), self._step + 1
        drawn: list[int] = self._carried.tolist()
        num_carried, num_tokens = len(drawn), int(self._lengths[self._carried].sum())
        over_long: list[int] = []
        num_empty = 0
        self._carried = _EMPTY
        while num_tokens < size.tokens:
            document = self._advance()
            length = int(self._lengths[document])
            if length > self._max_length:
                over_long.append(document)
            elif length < 1:
                num_empty += 1
            else:
                drawn.append(document)
                num_tokens += length
        documents = np.array(drawn, dtype=np.int64)
        passed_over = np.array(over_long, dtype=np.int64)
        return Batch(
            documents=documents,
            lengths=self._lengths[documents],
            num_micro_batches=size.num_micro_batches,
            over_long=passed_over,
            over_long_tokens=int(self._lengths[passed_over].sum()),
            num_empty=num_empty,
            num_carried=num_carried,
            epoch=self._epoch,
        )

    def carry(self, documents: IntArray) -> None:
        """Puts documents that did not fit at the head of the next batch."""
        self._carried = documents

    def _advance(self) -> int:
        if self._next == len(self._order):
            self._epoch += 1
            self._order = document_order(len(self._lengths), self._seed, self._epoch)
            self._next = 0
        self._next += 1
        return int(self._order[self._next - 1])
