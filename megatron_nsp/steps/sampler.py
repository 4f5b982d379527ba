"""Which documents make up each step: whole samples, in the order of a draw.

A step's batch is drawn until it holds the tokens of that step. Documents that cannot be trained on
(over the longest length, or empty) are passed over where they would have been drawn, and counted in
that batch. Samples that the planner could not fit are put at the head of the next batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.steps.draw import Blend, BlendDraw, DataSetDraw, DocumentDraw

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
        epoch: the epoch of the last document drawn, in its own data set where they are blended.
        num_drawn: documents drawn since the run began, those passed over as well.
    """

    documents: IntArray
    lengths: IntArray
    num_micro_batches: int = 1
    over_long: IntArray = field(default_factory=lambda: _EMPTY)
    over_long_tokens: int = 0
    num_empty: int = 0
    num_carried: int = 0
    epoch: int = 0
    num_drawn: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())


class BatchSampler:
    """Draws the batches of a run, one after the other.

    Args:
        lengths: `[documents]` tokens of each document.
        size_of: the size of each step.
        max_length: longest document to train on, in tokens.
        seed: seed of the order.
        blend: data sets that are drawn in shares; without it all documents are one data set.
        once: whether every document is drawn once and no more; without it there is no end.

    Raises:
        ValueError: no document can be trained on.
    """

    def __init__(
        self,
        lengths: IntArray,
        size_of: StepSizes,
        max_length: int,
        seed: int,
        blend: Blend | None = None,
        once: bool = False,
    ) -> None:
        """Starts at the first document of epoch 0."""
        usable = (lengths > 0) & (lengths <= max_length)
        if not usable.any():
            longest = int(lengths.max(initial=0))
            raise ValueError(
                f"none of the {len(lengths)} documents can be trained on: lengths must be 1 to "
                f"{max_length} tokens, the longest is {longest}"
            )
        self._lengths, self._max_length = lengths, max_length
        self._size_of, self._step = size_of, 0
        self._draw: DocumentDraw = (
            BlendDraw(blend, usable, seed) if blend else DataSetDraw(0, len(lengths), seed)
        )
        self._num_drawn = 0
        self._num_left = int(usable.sum()) if once else math.inf
        self._carried = _EMPTY

    @property
    def is_over(self) -> bool:
        """Whether nothing that can be trained on is left to draw, and nothing is carried."""
        return not self._num_left and not len(self._carried)

    def draw(self) -> Batch:
        """The next batch."""
        size, self._step = self._size_of(self._step), self._step + 1
        drawn: list[int] = self._carried.tolist()
        num_carried, num_tokens = len(drawn), int(self._lengths[self._carried].sum())
        over_long: list[int] = []
        num_empty = 0
        self._carried = _EMPTY
        while num_tokens < size.tokens and self._num_left:
            document = self._draw.next()
            self._num_drawn += 1
            length = int(self._lengths[document])
            if length > self._max_length:
                over_long.append(document)
            elif length < 1:
                num_empty += 1
            else:
                drawn.append(document)
                num_tokens += length
                self._num_left -= 1
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
            epoch=self._draw.epoch,
            num_drawn=self._num_drawn,
        )

    def carry(self, documents: IntArray) -> None:
        """Puts documents that did not fit at the head of the next batch."""
        self._carried = documents
