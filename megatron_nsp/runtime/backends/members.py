"""Keys and values on their way between the ring members of a node, and their gradients back.

Every rank talks to the ranks of the other members that have its place in theirs: they hold the same
heads of other tokens. Shapes: S rows of a member's stream, n key/value heads, D and V dimensions of
keys and values.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.runtime.backends.base import Exchange, NodeCall
from megatron_nsp.runtime.backends.blocks import Rounds
from megatron_nsp.runtime.backends.ulysses import among
from megatron_nsp.runtime.kernels.base import AttentionMask

KeysValues = tuple[Tensor, Tensor]


class KeyExchange(ABC):
    """How the keys and values of a node with several ring members get around in one pass.

    Args:
        call: the node.
        k_SnD: this rank's own keys, of the stream of its member.
        v_SnV: this rank's own values.
    """

    def __init__(self, call: NodeCall[Rounds], k_SnD: Tensor, v_SnV: Tensor) -> None:
        """Communicates nothing."""
        self.call, self.part, self.own = call, call.part, (k_SnD, v_SnV)
        self._shapes = (k_SnD.shape[1:], v_SnV.shape[1:])

    @staticmethod
    @abstractmethod
    def rounds(part: NodeSlice, mask: AttentionMask) -> Rounds:
        """The kernel calls of a rank in each round."""

    @abstractmethod
    def forth(self, number: int, held: KeysValues) -> Exchange:
        """Sends what round `number` needs; `held` is what the round before it had."""

    @abstractmethod
    def unpack(self, number: int, received: Tensor) -> KeysValues:
        """The keys and values of round `number`."""

    @abstractmethod
    def back(self, number: int, gradients: Sequence[KeysValues]) -> Exchange:
        """Returns the gradients of the round's keys; one entry for each kernel call."""

    @abstractmethod
    def add(self, number: int, received: Tensor, totals: KeysValues) -> None:
        """Adds returned gradients to those of this rank's own keys and values."""

    def others(self) -> list[int]:
        """The other members, in order."""
        return [member for member in range(self.part.num_members) if member != self.part.member]

    def exchange(
        self, pairs: Sequence[KeysValues], send: Mapping[int, int], recv: Mapping[int, int]
    ) -> Exchange:
        """An exchange with the ranks that have this one's place in other members.

        Args:
            pairs: what is sent, member by member in the order of their ranks.
            send: rows for each member, whatever turn of the circle its number is from.
            recv: rows from each member.
        """
        width = sum(shape.numel() for shape in self._shapes)
        counts = [
            among(
                [self._rank(member) for member in rows],
                [count * width for count in rows.values()],
                self.part.degree,
            )
            for rows in (send, recv)
        ]
        flat = [x.reshape(-1) for pair in pairs for x in pair]
        packed = torch.cat([self.own[0].new_empty(0), *flat])
        return Exchange(packed, counts[0], counts[1], self.call.group)

    def pairs(self, received: Tensor, rows: Sequence[int]) -> list[KeysValues]:
        """Keys and values of so many rows, one pair for each that was sent."""
        sizes = [count * shape.numel() for count in rows for shape in self._shapes]
        pieces = received.split(sizes)
        return [
            (k.view(-1, *self._shapes[0]), v.view(-1, *self._shapes[1]))
            for k, v in zip(pieces[::2], pieces[1::2], strict=True)
        ]

    def _rank(self, member: int) -> int:
        part = self.part
        return (member % part.num_members) * part.member_ranks + part.rank_in_member
