"""The kernel calls of a node, round by round, with their rows on the device.

Made once for a micro-batch and used by every layer and pass.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_nsp.arrays import IntArray
from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.ring_rows import (
    BlockRows,
    filled_bounds,
    filled_rows,
    gather_blocks,
    ring_block,
    seen_keys,
)
from megatron_nsp.plan.split import Split
from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds, VarlenCall


@dataclass(eq=False)
class Rows:
    """Rows of a tensor, as an index that is copied to a device once.

    Attributes:
        numbers: the rows, none of them twice; None = all rows in order.
        count: how many they are.
    """

    numbers: IntArray | None
    count: int
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: IntArray, total: int) -> "Rows":
        """These rows of `total`."""
        is_all = len(numbers) == total and bool((numbers == np.arange(total)).all())
        return cls(None if is_all else numbers, len(numbers))

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """These rows of `x`, contiguous; `x` itself if they are all."""
        return x if self.numbers is None else x.index_select(dim, self._index(x.device))

    def put(self, target: Tensor, values: Tensor, dim: int = 0) -> None:
        """Writes `values` into these rows of `target`."""
        if self.numbers is None:
            target.copy_(values)
        else:
            target.index_copy_(dim, self._index(target.device), values)

    def add(self, target: Tensor, values: Tensor) -> None:
        """Adds `values` to these rows of `target`; each row gets one of them."""
        if self.numbers is None:
            target.add_(values)
        else:
            target.index_add_(0, self._index(target.device), values.to(target.dtype))

    def _index(self, device: torch.device) -> Tensor:
        if device not in self._on_device:
            assert self.numbers is not None
            self._on_device[device] = torch.from_numpy(self.numbers).to(device)
        return self._on_device[device]


@dataclass(frozen=True, eq=False)
class Block:
    """One kernel call.

    Attributes:
        q_rows: its queries, in the stream of this rank's ring member.
        kv_rows: its keys, in what the round holds.
        samples: bounds of its entries.
        is_causal: whether the call has a causal mask.
    """

    q_rows: Rows
    kv_rows: Rows
    samples: SampleBounds
    is_causal: bool

    @classmethod
    def of(cls, rows: BlockRows, num_queries: int, num_keys: int) -> "Block":
        """The call that computes `rows` of so many queries and keys."""
        bounds = [np.concatenate([[0], np.cumsum(x)]) for x in (rows.q_lengths, rows.kv_lengths)]
        return cls(
            Rows.of(rows.q_rows, num_queries),
            Rows.of(rows.kv_rows, num_keys),
            SampleBounds(bounds[0], bounds[1]),
            rows.is_causal,
        )

    def call(self, mask: AttentionMask) -> VarlenCall:
        """What a kernel is called with in a layer with `mask`."""
        if not self.is_causal:
            mask = replace(mask, is_causal=False, window_left=None)
        return VarlenCall(self.samples, mask)


@dataclass(frozen=True, eq=False)
class Round:
    """One round of a node.

    Attributes:
        blocks: its kernel calls.
        returned: the rows of this rank's own keys whose gradients come back: in a ring those from
            the member that used them in this round; of gathered keys those from each member, which
            are the rows it is sent.
        held: of gathered keys how many this rank holds of each member.
    """

    blocks: tuple[Block, ...] = ()
    returned: tuple[Rows, ...] = ()
    held: tuple[int, ...] = ()


Rounds = tuple[Round, ...]


@dataclass(frozen=True, eq=False)
class Filled:
    """A native node's samples where all chunks are filled up to the same length.

    Attributes:
        rows: where this rank's tokens are among its filled-up rows.
        num_rows: how many these are.
        samples: bounds of the whole samples, filled up.
    """

    rows: Rows
    num_rows: int
    samples: SampleBounds

    @classmethod
    def of(cls, part: NodeSlice) -> "Filled":
        """Of this rank's slice of a native node."""
        bounds = filled_bounds(part)
        num_rows = int(bounds[-1]) // part.ring_degree
        return cls(Rows.of(filled_rows(part), num_rows), num_rows, SampleBounds(bounds))

    def fill(self, x: Tensor) -> Tensor:
        """`[num_rows, ...]` the rank's rows of `x` in their places, zeros elsewhere; a copy."""
        filled = x.new_zeros(self.num_rows, *x.shape[1:])
        self.rows.put(filled, x)
        return filled


def split_for(split: Split, mask: AttentionMask) -> Split:
    """How a node divides attention under a mask: sliding windows need their keys gathered."""
    if split.ring_degree > 1 and not split.is_native and mask.window_left is not None:
        return Split(split.ring_degree, "gather")
    return split


def node_rounds(part: NodeSlice, mask: AttentionMask) -> Rounds:
    """The kernel calls of a rank in each round of a node."""
    split, streams = split_for(part.split, mask), part.member_tokens
    if split.ring_degree == 1:
        samples = SampleBounds(part.cu_seqlens)
        everything = Rows(None, part.stream_tokens)
        return (Round((Block(everything, everything, samples, mask.is_causal),)),)
    if split.outer == "gather":
        return Round(), _gather_round(part, mask)
    rounds = []
    for number in range(split.ring_degree):
        source = (part.member - number) % split.ring_degree
        user = (part.member + number) % split.ring_degree
        block = ring_block(part, part.member, source, mask.is_causal)
        used = ring_block(part, user, part.member, mask.is_causal).kv_rows
        calls = _calls((block,), part.stream_tokens, streams[source])
        rounds.append(Round(calls, (Rows.of(used, part.stream_tokens),) if number else ()))
    return tuple(rounds)


def _gather_round(part: NodeSlice, mask: AttentionMask) -> Round:
    how, members = (mask.is_causal, mask.window_left), range(part.ring_degree)
    held = [seen_keys(part, part.member, source, *how) for source in members]
    counts = tuple(map(len, held))
    returned = tuple(
        Rows.of(seen_keys(part, user, part.member, *how), part.stream_tokens) for user in members
    )
    calls = _calls(gather_blocks(part, held, *how), part.stream_tokens, sum(counts))
    return Round(calls, returned, counts)


def _calls(blocks: tuple[BlockRows, ...], num_queries: int, num_keys: int) -> tuple[Block, ...]:
    return tuple(Block.of(rows, num_queries, num_keys) for rows in blocks if len(rows.q_lengths))
