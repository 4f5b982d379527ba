"""Tokens for heads and back, among the u ranks of a ring member (Ulysses, arXiv 2309.14509).

Each direction is one all-to-all, whatever it carries. Shapes: T this rank's tokens of the node, S
tokens in the stream of its member, H and K query and key/value heads before the exchange, D the
dimension of a head. Afterwards a rank holds h = H/u query heads and the key/value heads these need,
n = max(K/u, 1). When u > K several ranks receive the same key/value head; the gradients of the
copies are summed where the head came from.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.runtime.backends.base import Exchange


def split_heads(x_THD: Tensor, degree: int) -> Tensor:
    """`[u, T, n, D]` the heads each rank needs, repeated where ranks share a head."""
    num_heads = x_THD.shape[1]
    if num_heads % degree:
        assert degree % num_heads == 0, f"{num_heads=} {degree=}"
        # Rank r attends with query heads of key/value head r * K // u.
        return x_THD.transpose(0, 1).unsqueeze(2).repeat_interleave(degree // num_heads, dim=0)
    return x_THD.unflatten(1, (degree, -1)).transpose(0, 1)


def join_heads(x_uTnD: Tensor, num_heads: int) -> Tensor:
    """`[T, num_heads, D]` the inverse of `split_heads`; copies of a head are summed."""
    degree = x_uTnD.shape[0]
    if num_heads % degree:
        copies = x_uTnD.squeeze(2).unflatten(0, (num_heads, degree // num_heads))  # [K, u/K, T, D]
        return copies.sum(dim=1).transpose(0, 1)
    return x_uTnD.transpose(0, 1).flatten(1, 2)


def own_heads(part: NodeSlice, num_heads: int) -> slice:
    """The query heads that this rank attends with."""
    each = num_heads // part.member_ranks
    return slice(part.rank_in_member * each, (part.rank_in_member + 1) * each)


class ToHeads:
    """Takes tensors from this rank's tokens and all heads to all tokens and this rank's heads.

    Args:
        part: the rank's slice.
        group: the node's group.
        tensors: `[T, H, D]` each, of head counts and dimensions of their own.
        rank_tokens: for each of them the rows that every rank of the node has.
    """

    def __init__(
        self,
        part: NodeSlice,
        group: dist.ProcessGroup | None,
        tensors: Sequence[Tensor],
        rank_tokens: Sequence[tuple[int, ...]],
    ) -> None:
        """Packs; a member of one rank has nothing to exchange."""
        self._degree, self._tensors = part.member_ranks, tensors
        if self._degree == 1:
            self.exchange = keep(tensors[0])
            return
        ranks = range(part.member * self._degree, (part.member + 1) * self._degree)
        blocks = [split_heads(x, self._degree) for x in tensors]
        self._row_shapes = [x.shape[2:] for x in blocks]
        self._sizes = [
            [rows[rank] * x.shape[2:].numel() for x, rows in zip(blocks, rank_tokens, strict=True)]
            for rank in ranks
        ]
        sent = sum(x[0].numel() for x in blocks)
        self.exchange = Exchange(
            pack(blocks),
            among(ranks, [sent] * self._degree, part.degree),
            among(ranks, [sum(sizes) for sizes in self._sizes], part.degree),
            group,
        )

    def unpack(self, received: Tensor) -> list[Tensor]:
        """`[S, n, D]` each, contiguous."""
        if self._degree == 1:
            return [x.contiguous() for x in self._tensors]
        pieces = received.split([size for sizes in self._sizes for size in sizes])
        count = len(self._tensors)
        return [
            torch.cat(pieces[place::count]).view(-1, *shape)
            for place, shape in enumerate(self._row_shapes)
        ]


class ToTokens:
    """Takes tensors from all tokens and this rank's heads to this rank's tokens and all heads.

    Args:
        part: the rank's slice.
        group: the node's group.
        tensors: `[S, n, D]` each.
        num_heads: heads of each where it goes.
    """

    def __init__(
        self,
        part: NodeSlice,
        group: dist.ProcessGroup | None,
        tensors: Sequence[Tensor],
        num_heads: Sequence[int],
    ) -> None:
        """Packs; a member of one rank has nothing to exchange."""
        self._degree, self._tensors, self._num_heads = part.member_ranks, tensors, num_heads
        if self._degree == 1:
            self.exchange = keep(tensors[0])
            return
        ranks = range(part.member * self._degree, (part.member + 1) * self._degree)
        tokens = [part.rank_tokens[rank] for rank in ranks]
        width = sum(x.shape[1:].numel() for x in tensors)
        per_rank = zip(*(x.split(tokens) for x in tensors), strict=True)
        send = torch.cat([x.reshape(-1) for parts in per_rank for x in parts])
        self._own_tokens = part.num_tokens
        self.exchange = Exchange(
            send,
            among(ranks, [count * width for count in tokens], part.degree),
            among(ranks, [part.num_tokens * width] * self._degree, part.degree),
            group,
        )

    def unpack(self, received: Tensor) -> list[Tensor]:
        """`[T, num_heads, D]` each."""
        if self._degree == 1:
            return list(self._tensors)
        per_rank = received.view(self._degree, -1)
        sizes = [self._own_tokens * x.shape[1:].numel() for x in self._tensors]
        parts = per_rank.split(sizes, dim=1)
        return [
            join_heads(part.unflatten(1, (self._own_tokens, *x.shape[1:])), heads)
            for part, x, heads in zip(parts, self._tensors, self._num_heads, strict=True)
        ]


def pack(blocks: Sequence[Tensor]) -> Tensor:
    """`[u * elements]` contiguous: for each rank its part of every block `[u, ...]`, in turn."""
    degree, sizes = blocks[0].shape[0], [x[0].numel() for x in blocks]
    packed = blocks[0].new_empty(degree, sum(sizes))
    for place, block in zip(packed.split(sizes, dim=1), blocks, strict=True):
        place.unflatten(1, block.shape[1:]).copy_(block)
    return packed.view(-1)


def among(ranks: Sequence[int], counts: Sequence[int], degree: int) -> tuple[int, ...]:
    """`[degree]` counts of these ranks of a node, and 0 for the others."""
    spread = [0] * degree
    for rank, count in zip(ranks, counts, strict=True):
        spread[rank] = count
    return tuple(spread)


def keep(x: Tensor) -> Exchange:
    """The exchange of a rank that has nothing to send."""
    return Exchange(x.new_empty(0), (), (), None)
