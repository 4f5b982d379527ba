"""Who holds which tokens: the plan layout of one micro-batch, as index maths.

The samples of a node, concatenated in stream order, are its stream of S tokens. Rank i of a node of
degree d holds the contiguous slice [floor(S*i/d), floor(S*(i+1)/d)): no padding, and counts that
differ by at most one. A node with ring members has one such stream a member (`split.py`). A rank's
buffer is its slices, root to leaf, then filler tokens.

    degrees (1, 2), node 2:0 with samples a (5 tokens) and b (2), node 1:1 with c (3 tokens)

        stream of 2:0     a0 a1 a2 | a3 a4 b0 b1          (7 tokens: 3 on rank 0, 4 on rank 1)
        buffer of rank 0  a0 a1 a2
        buffer of rank 1  a3 a4 b0 b1 c0 c1 c2
        positions         0 1 2       3 4 0 1 0 1 2       (the place in the token's own sample)

Because the slices of a member's ranks in order are its stream, an all-to-all between them needs no
permutation: what a rank receives from the r-th is the r-th part of the stream.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.chunks import Dealing
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import Split, rank_bounds
from megatron_nsp.plan.tree import Node


class Segment(NamedTuple):
    """A run of one sample's tokens on one rank: tokens [start, stop) of `sample`."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class NodeSlice:
    """One rank's part of one active node, or of the samples of one from some place on.

    Attributes:
        node: the node.
        rank_in_node: this rank's place in the node, 0..degree-1.
        samples: the node's samples, in stream order.
        lengths: their lengths, in tokens.
        split: how the node divides attention among its ranks.
        bounds: `[R, u + 1]` slice bounds of the ranks in the streams of their ring members.
        buffer_start: where the slice starts in the rank's buffer.
    """

    node: Node
    rank_in_node: int
    samples: IntArray
    lengths: IntArray
    split: Split
    bounds: IntArray
    buffer_start: int
    _rests: "dict[int, NodeSlice]" = field(default_factory=dict, init=False, repr=False)

    @property
    def degree(self) -> int:
        """Ranks of the node (d)."""
        return self.num_members * self.member_ranks

    @property
    def num_members(self) -> int:
        """Ring members of the node (R)."""
        return len(self.bounds)

    @property
    def member_ranks(self) -> int:
        """Ranks of a ring member (u)."""
        return int(self.bounds.shape[1]) - 1

    @property
    def member(self) -> int:
        """The ring member that this rank belongs to."""
        return self.rank_in_node // self.member_ranks

    @property
    def rank_in_member(self) -> int:
        """This rank's place in its ring member."""
        return self.rank_in_node % self.member_ranks

    @cached_property
    def dealing(self) -> Dealing:
        """The node's samples in the chunks of its ring members."""
        return self.split.deal(self.lengths)

    @cached_property
    def rank_tokens(self) -> tuple[int, ...]:
        """Tokens each rank of the node holds."""
        return tuple(np.diff(self.bounds, axis=1).reshape(-1).tolist())

    @property
    def num_tokens(self) -> int:
        """Tokens this rank holds."""
        return self.rank_tokens[self.rank_in_node]

    @cached_property
    def member_tokens(self) -> tuple[int, ...]:
        """Tokens in the stream of each ring member."""
        return tuple((self.bounds[:, -1] - self.bounds[:, 0]).tolist())

    @property
    def stream_tokens(self) -> int:
        """S: tokens in the stream of this rank's ring member, to which its heads attend."""
        return self.member_tokens[self.member]

    @property
    def buffer_slice(self) -> slice:
        """The rows of the rank's buffer that this slice fills."""
        return slice(self.buffer_start, self.buffer_start + self.num_tokens)

    @cached_property
    def cu_seqlens(self) -> IntArray:
        """`[num_samples + 1]` where each sample starts in the node's samples, and the end."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def segments(self) -> tuple[Segment, ...]:
        """The runs of samples in this rank's slice, in buffer order; none of them is empty."""
        chunks = self.dealing.starts
        ends = self.member, 2 * self.num_members - 1 - self.member
        places = [(chunks[c], chunks[c + 1]) for c in ends]
        if self.num_members == 1:  # the two halves of a sample are one run
            places = [(chunks[0], chunks[2])]
        runs = np.stack([np.stack(place) for place in places], axis=2).reshape(2, -1)
        samples = np.repeat(self.samples, len(places))
        # Where each run starts in the member's stream, from the first token of these samples on.
        sizes = runs[1] - runs[0]
        starts_at = np.cumsum(sizes) - sizes
        low, high = self.bounds[self.member, self.rank_in_member :][:2]
        first = runs[0] + np.clip(low - starts_at, 0, sizes)
        last = runs[0] + np.clip(high - starts_at, 0, sizes)
        held = np.flatnonzero(last > first)
        columns = (samples[held], first[held], last[held])
        return tuple(map(Segment, *(column.tolist() for column in columns)))

    def without_first(self, num_samples: int) -> "NodeSlice":
        """The slice of the samples after the first `num_samples`: the end of this one's rows.

        Worked out once: every layer asks for the same.
        """
        if num_samples == 0:
            return self
        if num_samples not in self._rests:
            self._rests[num_samples] = self._rest(num_samples)
        return self._rests[num_samples]

    def _rest(self, num_samples: int) -> "NodeSlice":
        gone = self.dealing.tokens[:, :num_samples].sum(axis=1)
        bounds = np.maximum(self.bounds - gone[:, None], 0)
        left = int(np.diff(bounds[self.member, self.rank_in_member :][:2])[0])
        return replace(
            self,
            samples=self.samples[num_samples:],
            lengths=self.lengths[num_samples:],
            bounds=bounds,
            buffer_start=self.buffer_start + self.num_tokens - left,
        )


@dataclass(frozen=True, eq=False)
class RankLayout:
    """What one rank holds in one micro-batch.

    Attributes:
        rank: the rank in the domain.
        slices: one entry an active node on the rank's path, root first.
        num_filler_tokens: rows at the end of the buffer that belong to no sample.
    """

    rank: int
    slices: tuple[NodeSlice, ...]
    num_filler_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of samples on this rank."""
        return sum(part.num_tokens for part in self.slices)

    @property
    def buffer_tokens(self) -> int:
        """T: rows of the buffer, filler tokens included."""
        return self.num_tokens + self.num_filler_tokens

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The runs of samples in the buffer, in buffer order."""
        return tuple(segment for part in self.slices for segment in part.segments())

    @cached_property
    def positions(self) -> IntArray:
        """`[T]` place of each token in its own sample; 0 for filler tokens."""
        runs = [np.arange(segment.start, segment.stop) for segment in self.segments]
        return np.concatenate([*runs, np.zeros(self.num_filler_tokens, dtype=np.int64)])

    @property
    def max_length(self) -> int:
        """Length of the longest sample with tokens on this rank, at least 1."""
        return max((int(part.lengths.max()) for part in self.slices), default=1)

    def token_numbers(self, lengths: IntArray) -> IntArray:
        """`[T - filler]` number of each held token in the batch's concatenated samples.

        Args:
            lengths: `[n]` tokens of every sample of the batch, by sample number.
        """
        offsets = np.cumsum(lengths) - lengths
        runs = [offsets[s] + np.arange(start, stop) for s, start, stop in self.segments]
        return np.concatenate([np.zeros(0, dtype=np.int64), *runs])


def rank_layout(plan: Plan, rank: int, micro_batch: int = 0, row_multiple: int = 1) -> RankLayout:
    """The layout of `rank` in `micro_batch`.

    Args:
        plan: the plan.
        rank: rank in the domain.
        micro_batch: micro-batch of the step.
        row_multiple: the buffer is filled to a multiple of this many rows, and to at least one:
            what tensor-parallel sequence parallelism or FP8 needs.
    """
    slices, buffer_start = [], 0
    for node in plan.active_path(rank, micro_batch):
        samples = plan.samples_of(node, micro_batch)
        lengths = plan.lengths[samples]
        split = plan.split_of(node, micro_batch)
        part = NodeSlice(
            node=node,
            rank_in_node=rank - plan.tree.ranks(node)[0],
            samples=samples,
            lengths=lengths,
            split=split,
            bounds=rank_bounds(lengths, plan.tree.degree(node), split),
            buffer_start=buffer_start,
        )
        slices.append(part)
        buffer_start += part.num_tokens
    rows = max(1, -(-buffer_start // row_multiple)) * row_multiple
    return RankLayout(rank, tuple(slices), rows - buffer_start)
