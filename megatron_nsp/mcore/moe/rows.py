"""What a router has to know of the rows of a buffer, beside their hidden states.

A router sees one tensor-parallel rank's part of one rank's buffer. The plan says what the rest of
the domain holds, so that no rank has to ask: how many tokens there are, and which documents lie on
other ranks too.

    rows of a rank     a a a b b c c -        a on four ranks, b on two, c here alone, - a filler
    row_document       0 0 0 1 1 2 2 3
    lengths            40 6 2 1               tokens of all of a, b and c
    shared             0 1                    the documents whose counts ranks add up ...
    shared_place       4 7                    ... and where, among num_shared of the domain

Shapes: T rows of this tensor-parallel rank, D documents with tokens on this rank, and the filler
rows as one more.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.runtime.attention import NestedBatch


def _on_device(values: IntArray) -> Tensor:
    return torch.from_numpy(values).to("cuda", non_blocking=True)


@dataclass(frozen=True, eq=False)
class RowDocuments:
    """The document of each row.

    Attributes:
        row_document: `[T]` which of this rank's documents a row is of; D for filler rows.
        lengths: `[D + 1]` tokens of each document, wherever they lie; 1 for filler rows.
        shared: which of this rank's documents lie on other ranks too.
        shared_place: the place of each of these among those of the domain.
        num_shared: documents of the micro-batch that lie on several ranks of the domain.
    """

    row_document: Tensor
    lengths: Tensor
    shared: Tensor
    shared_place: Tensor
    num_shared: int


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """The rows of one micro-batch that a router sees.

    Attributes:
        nested: the micro-batch.
        part: this tensor-parallel rank's part of the buffer's rows, under sequence parallelism.
        num_parts: how many there are.
    """

    nested: NestedBatch
    part: int = 0
    num_parts: int = 1

    @property
    def _own_rows(self) -> slice:
        rows, rest = divmod(self.nested.layout.buffer_tokens, self.num_parts)
        assert rest == 0, f"{self.nested.layout.buffer_tokens=} {self.num_parts=}"
        return slice(self.part * rows, (self.part + 1) * rows)

    @cached_property
    def is_filler(self) -> Tensor:
        """`[T, 1]` bool, True in filler rows: Megatron's padding mask as its routers take it."""
        layout, rows = self.nested.layout, self._own_rows
        numbers = torch.arange(rows.start, rows.stop, device="cuda")
        return (numbers >= layout.num_tokens).unsqueeze(1)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch, over the whole domain."""
        plan = self.nested.plan
        return int(plan.lengths[plan.micro_batch == self.nested.micro_batch].sum())

    @cached_property
    def documents(self) -> RowDocuments:
        """The document of each row; worked out for the first layer that asks."""
        plan, layout = self.nested.plan, self.nested.layout
        segments = np.array(layout.segments, dtype=np.int64).reshape(-1, 3)
        samples, numbers = np.unique(segments[:, 0], return_inverse=True)
        row_document = np.repeat(numbers, segments[:, 2] - segments[:, 1])
        filler = np.full(layout.num_filler_tokens, len(samples))
        is_shared = (plan.micro_batch == self.nested.micro_batch) & (
            plan.depth != plan.tree.depth_of(1)
        )
        of_domain = np.flatnonzero(is_shared)
        shared = np.flatnonzero(is_shared[samples])
        return RowDocuments(
            _on_device(np.concatenate([row_document, filler])[self._own_rows]),
            _on_device(np.append(plan.lengths[samples], 1)),
            _on_device(shared),
            _on_device(np.searchsorted(of_domain, samples[shared])),
            len(of_domain),
        )
