"""How a node divides attention among its ranks: heads inside, tokens outside.

The d ranks of a node are R ring members of u = d / R ranks each, consecutive ranks side by side.
Inside a member the u ranks exchange tokens for heads (Ulysses); between members, queries stay where
they are and keys and values travel, as the node's backend says (`backends/`).

    d = 4, R = 2:   ring member 0 = ranks 0 1     ring member 1 = ranks 2 3

Samples are dealt to members in chunks (`chunks.py`). The chunks of a member, sample by sample, are
its stream, and rank a of the member holds the contiguous slice [floor(S*a/u), floor(S*(a+1)/u)).
"""

from typing import Any, NamedTuple

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.backends import BACKENDS, Backend, NodeHeads, backends_of
from megatron_nsp.plan.chunks import Dealing
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.ring_rows import KeyMask


class Split(NamedTuple):
    """How one node divides attention.

    Attributes:
        num_members: ring members (R); divides the degree of the node.
        name: the backend.
    """

    num_members: int = 1
    name: str = "ring"

    @property
    def backend(self) -> Backend:
        """What answers for the split."""
        return BACKENDS[self.name]

    @property
    def num_rounds(self) -> int:
        """Rounds of a pass."""
        return self.backend.num_rounds(self.num_members)

    def phases(self, pass_: Pass, number: int) -> tuple[Phase, ...]:
        """The phases of a round, in order; none where there is no such round."""
        if not 0 <= number < self.num_rounds:
            return ()
        return self.backend.phases(pass_, number, self.num_members)

    def label(self, degree: int) -> str:
        """What users call a node of this degree: 'ulysses', 'ring', 'usp', ..."""
        return self.backend.label(degree, self.num_members)

    def under(self, mask: KeyMask) -> "Split":
        """How the node divides attention in a layer with this mask."""
        if self.num_members == 1:
            return self
        return Split(self.num_members, self.backend.under(mask))

    def deal(self, lengths: IntArray) -> Dealing:
        """Samples of these lengths, dealt to the ring members."""
        return self.backend.deal(lengths, self.num_members)

    def to_dict(self) -> dict[str, int | str]:
        """The split as JSON values; nothing for Ulysses."""
        if self == ULYSSES:
            return {}
        return {"ring_degree": self.num_members, "outer": self.name}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Split":
        """The inverse of `to_dict`; other entries are left alone."""
        return cls(int(data.get("ring_degree", 1)), str(data.get("outer", "ring")))

    def validate(self, degree: int) -> None:
        """Checks that a node of this degree can be divided so.

        Raises:
            ValueError: there is no such backend, or it cannot have so many ring members there.
        """
        if self.name not in BACKENDS:
            raise ValueError(
                f"keys and values get around by {' or '.join(BACKENDS)}, not {self.name}"
            )
        self.backend.check_members(degree, self.num_members)


ULYSSES = Split()


def possible_splits(choice: str, heads: NodeHeads) -> tuple[Split, ...]:
    """The ways in which a node may be split where users ask for this; none if it cannot be.

    Args:
        choice: one of `backend_choices()`.
        heads: the node.
    """
    if heads.degree == 1:
        return (ULYSSES,)
    return tuple(
        Split(num_members, backend.name)
        for backend in backends_of(choice)
        for num_members in dict.fromkeys(backend.member_counts(heads).get(choice, ()))
    )


def slice_bounds(stream_tokens: int, degree: int) -> IntArray:
    """`[degree + 1]` where the slice of each rank starts in a stream, and the end."""
    return stream_tokens * np.arange(degree + 1, dtype=np.int64) // degree


def rank_bounds(lengths: IntArray, degree: int, split: Split) -> IntArray:
    """`[R, u + 1]` slice bounds of a node's ranks in the streams of their ring members.

    Args:
        lengths: `[n]` tokens of the node's samples.
        degree: ranks of the node (d).
        split: how they divide attention.
    """
    streams = split.deal(lengths).member_tokens
    return np.stack([slice_bounds(tokens, degree // split.num_members) for tokens in streams])


def rank_tokens(lengths: IntArray, degree: int, split: Split) -> IntArray:
    """`[degree]` tokens that each rank of a node holds."""
    return np.diff(rank_bounds(lengths, degree, split), axis=1).reshape(-1)
