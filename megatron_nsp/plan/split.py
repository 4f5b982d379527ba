"""How a node divides attention among its ranks: heads inside, tokens outside.

The d ranks of a node are R ring members of u = d / R ranks each, consecutive ranks side by side.
Inside a member the u ranks exchange tokens for heads (Ulysses); between members, queries stay where
they are and keys and values travel. R = 1 is Ulysses alone, u = 1 a ring alone, and what lies
between is what the literature calls USP (Fang and Zhao, arXiv 2405.07719).

    d = 4, R = 2:   ring member 0 = ranks 0 1     ring member 1 = ranks 2 3

A sample is cut into 2R chunks and member r holds chunks r and 2R-1-r, its head and its tail: with a
causal mask all members then have the same work. The chunks of a member, sample by sample, are its
stream, and rank a of the member holds the contiguous slice [floor(S*a/u), floor(S*(a+1)/u)) of it.

    R = 2, samples of 9 and 4 tokens     chunks 0..1 2..3 4..5 6..8     0 1 2 3
        member 0                         0 1 6 7 8                      0 3
        member 1                         2 3 4 5                        1 2

Transformer Engine's own context parallelism deals samples in the same way, but wants all chunks of
a sample to be equally long: a sample is filled up to 2R chunks of c = ceil(L / 2R) rows, and chunk
i is what there is of the tokens [c*i, c*(i+1)).

    R = 2, samples of 9 and 4 tokens     chunks 0..2 3..5 6..8 none     0 1 2 3
        member 0                         0 1 2                          0 3
        member 1                         3 4 5 6 7 8                    1 2
"""

from typing import Any, NamedTuple

import numpy as np

from megatron_nsp.arrays import IntArray

OUTER = ("ring", "gather")
NATIVE = ("te-p2p", "te-a2a")
"""What Transformer Engine does itself, communication and all: its ring, and its Ulysses."""


class Split(NamedTuple):
    """How one node divides attention.

    Attributes:
        ring_degree: ring members (R); divides the degree of the node.
        outer: how keys and values get around: 'ring' passes them on member by member, under the
            compute of what is there already; 'gather' sends them to all members at once; 'te-p2p'
            and 'te-a2a' leave the whole node to Transformer Engine, every rank a member.
    """

    ring_degree: int = 1
    outer: str = "ring"

    @property
    def is_native(self) -> bool:
        """Whether Transformer Engine moves tokens or heads itself, out of sight of our queue."""
        return self.outer in NATIVE

    def backend(self, degree: int) -> str:
        """What a node of this degree is called: 'ulysses', 'ring', 'usp' or what `outer` says."""
        if self.ring_degree == 1:
            return "ulysses"
        if self.outer != "ring":
            return self.outer
        return "ring" if self.ring_degree == degree else "usp"

    def to_dict(self) -> dict[str, int | str]:
        """The split as JSON values; nothing for Ulysses."""
        if self == ULYSSES:
            return {}
        return {"ring_degree": self.ring_degree, "outer": self.outer}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Split":
        """The inverse of `to_dict`; other entries are left alone."""
        return cls(int(data.get("ring_degree", 1)), str(data.get("outer", "ring")))

    def validate(self, degree: int) -> None:
        """Checks that a node of this degree can be divided so.

        Raises:
            ValueError: the ring members do not divide the ranks, or are not all of them where
                Transformer Engine is to be used, or there is no such exchange.
        """
        if self.ring_degree < 1 or degree % self.ring_degree:
            raise ValueError(
                f"a node of degree {degree} cannot have {self.ring_degree} ring members"
            )
        if self.outer not in OUTER + NATIVE:
            raise ValueError(
                f"keys and values get around by {' or '.join(OUTER + NATIVE)}, not {self.outer}"
            )
        if self.is_native and (self.ring_degree != degree or degree == 1):
            raise ValueError(
                f"{self.outer} divides a node among all of its ranks, 2 at least: a node of degree "
                f"{degree} cannot have {self.ring_degree} of them"
            )

    def check_heads(self, degree: int, num_heads: int, num_kv_heads: int) -> None:
        """Checks that the heads divide where Transformer Engine exchanges tokens for them.

        Args:
            degree: ranks of the node.
            num_heads: query heads on a tensor-parallel rank.
            num_kv_heads: key/value heads on a tensor-parallel rank.

        Raises:
            ValueError: they do not; the message names the numbers.
        """
        if self.outer == "te-a2a" and (num_heads % degree or num_kv_heads % degree):
            raise ValueError(
                f"te-a2a divides heads, and repeats none: {num_heads} query and {num_kv_heads} "
                f"key/value heads are no multiples of the degree {degree}"
            )


ULYSSES = Split()


def slice_bounds(stream_tokens: int, degree: int) -> IntArray:
    """`[degree + 1]` where the slice of each rank starts in a stream, and the end."""
    return stream_tokens * np.arange(degree + 1, dtype=np.int64) // degree


def chunk_tokens(lengths: IntArray, ring_degree: int) -> IntArray:
    """`[n]` rows of every chunk of each sample where all its chunks are equally long (c)."""
    tokens: IntArray = -(-lengths // (2 * ring_degree))
    return tokens


def chunk_starts(lengths: IntArray, split: Split) -> IntArray:
    """`[2R + 1, n]` where each chunk of each sample starts, and the end."""
    num_chunks = 2 * split.ring_degree
    places = np.arange(num_chunks + 1, dtype=np.int64)[:, None]
    starts: IntArray = lengths * places // num_chunks
    if split.is_native:
        starts = np.minimum(places * chunk_tokens(lengths, split.ring_degree), lengths)
    return starts


def head_and_tail_tokens(lengths: IntArray, split: Split) -> tuple[IntArray, IntArray]:
    """`[R, n]` twice: tokens of each sample's head chunk and of its tail chunk at each member."""
    sizes = np.diff(chunk_starts(lengths, split), axis=0)
    return sizes[: split.ring_degree], sizes[split.ring_degree :][::-1]


def member_tokens(lengths: IntArray, split: Split) -> IntArray:
    """`[R, n]` tokens of each sample at each ring member."""
    heads, tails = head_and_tail_tokens(lengths, split)
    return heads + tails


def rank_bounds(lengths: IntArray, degree: int, split: Split) -> IntArray:
    """`[R, u + 1]` slice bounds of a node's ranks in the streams of their ring members.

    Args:
        lengths: `[n]` tokens of the node's samples.
        degree: ranks of the node (d).
        split: how they divide attention.
    """
    streams = member_tokens(lengths, split).sum(axis=1)
    return np.stack([slice_bounds(int(s), degree // split.ring_degree) for s in streams])


def rank_tokens(lengths: IntArray, degree: int, split: Split) -> IntArray:
    """`[degree]` tokens that each rank of a node holds."""
    return np.diff(rank_bounds(lengths, degree, split), axis=1).reshape(-1)
