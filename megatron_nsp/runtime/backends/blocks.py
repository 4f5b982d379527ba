"""The kernel calls of a node, round by round, with their rows on the device.

Made once for a micro-batch and used by every layer and pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.ring_rows import BlockRows, KeyMask
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


def key_mask(mask: AttentionMask) -> KeyMask:
    """What planning needs to know of a mask."""
    return KeyMask(mask.is_causal, mask.window_left)


def one_round(part: NodeSlice, mask: AttentionMask) -> Rounds:
    """The rounds of a node with one ring member: a single call on the whole stream."""
    everything = Rows(None, part.stream_tokens)
    block = Block(everything, everything, SampleBounds(part.cu_seqlens), mask.is_causal)
    return (Round((block,)),)


def kernel_calls(blocks: Sequence[BlockRows], num_queries: int, num_keys: int) -> tuple[Block, ...]:
    """The calls that compute these rows of so many queries and keys; those of nothing left out."""
    return tuple(Block.of(rows, num_queries, num_keys) for rows in blocks if len(rows.q_lengths))
