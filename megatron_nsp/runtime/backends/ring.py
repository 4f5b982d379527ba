"""Keys and values on their way between the ring members of a node, and their gradients back.

Every rank talks to the ranks of the other members that have its place in theirs: they hold the same
heads of other tokens. Shapes: S rows of a member's stream, n key/value heads, D and V dimensions of
keys and values.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.runtime.backends.base import Exchange, NodeCall
from megatron_nsp.runtime.backends.blocks import Rows
from megatron_nsp.runtime.backends.ulysses import among
from megatron_nsp.runtime.kernels.base import lse_dtype

KeysValues = tuple[Tensor, Tensor]


class KeyExchange(Protocol):
    """How the keys and values of a node get around."""

    def forth(self, number: int, held: KeysValues) -> Exchange:
        """Sends what round `number` needs; `held` is what the round before it had."""
        ...

    def unpack(self, number: int, received: Tensor) -> KeysValues:
        """The keys and values of round `number`."""
        ...

    def back(self, number: int, gradients: Sequence[KeysValues]) -> Exchange:
        """Returns the gradients of the round's keys; one entry for each kernel call."""
        ...

    def add(self, number: int, received: Tensor, totals: KeysValues) -> None:
        """Adds returned gradients to those of this rank's own keys and values."""
        ...


class _Members:
    """The ranks of a node that hold the same heads, one in each ring member."""

    def __init__(self, call: NodeCall, k_SnD: Tensor, v_SnV: Tensor) -> None:
        self.part: NodeSlice = call.part
        self.group: dist.ProcessGroup | None = call.group
        self.shapes = (k_SnD.shape[1:], v_SnV.shape[1:])
        self.width = sum(shape.numel() for shape in self.shapes)
        self.nothing = k_SnD.new_empty(0)

    def rank(self, member: int) -> int:
        part = self.part
        return (member % part.num_members) * part.member_ranks + part.rank_in_member

    def exchange(self, send: Tensor, send_rows: dict[int, int], recv: dict[int, int]) -> Exchange:
        """`send_rows` and `recv` are rows by member."""
        counts = [
            among(
                [self.rank(member) for member in rows],
                [count * self.width for count in rows.values()],
                self.part.degree,
            )
            for rows in (send_rows, recv)
        ]
        return Exchange(send, counts[0], counts[1], self.group)

    def flat(self, pairs: Sequence[KeysValues]) -> Tensor:
        return torch.cat([self.nothing, *(x.reshape(-1) for pair in pairs for x in pair)])

    def split(self, received: Tensor, rows: Sequence[int]) -> list[KeysValues]:
        """Keys and values of so many rows, one pair for each that was sent."""
        sizes = [count * shape.numel() for count in rows for shape in self.shapes]
        pieces = received.split(sizes)
        return [
            (k.view(-1, *self.shapes[0]), v.view(-1, *self.shapes[1]))
            for k, v in zip(pieces[::2], pieces[1::2], strict=True)
        ]


class Ring:
    """Members in a circle: in round r the keys of the member r places before are there.

    They are passed on from neighbour to neighbour; gradients go back to the keys' own member
    directly, in the dtype of the keys, and are summed there in the precision of the LSE.
    """

    def __init__(self, call: NodeCall, k_SnD: Tensor, v_SnV: Tensor) -> None:
        """Communicates nothing."""
        self._members = _Members(call, k_SnD, v_SnV)
        self._rows = call.part.member_tokens
        self._rounds = call.rounds

    def _source(self, number: int) -> int:
        part = self._members.part
        return (part.member - number) % part.num_members

    def _returned(self, number: int) -> Rows:
        (rows,) = self._rounds[number].returned
        return rows

    def forth(self, number: int, held: KeysValues) -> Exchange:
        """See `KeyExchange.forth`."""
        member = self._members.part.member
        sent, received = self._rows[self._source(number - 1)], self._rows[self._source(number)]
        send = self._members.flat([held])
        return self._members.exchange(send, {member + 1: sent}, {member - 1: received})

    def unpack(self, number: int, received: Tensor) -> KeysValues:
        """See `KeyExchange.unpack`."""
        return self._members.split(received, [self._rows[self._source(number)]])[0]

    def back(self, number: int, gradients: Sequence[KeysValues]) -> Exchange:
        """See `KeyExchange.back`."""
        member, used = self._members.part.member, self._rounds[number].blocks
        send, num_used = self._members.flat(gradients), sum(block.kv_rows.count for block in used)
        num_returned = self._returned(number).count
        return self._members.exchange(
            send, {member - number: num_used}, {member + number: num_returned}
        )

    def add(self, number: int, received: Tensor, totals: KeysValues) -> None:
        """See `KeyExchange.add`."""
        rows = self._returned(number)
        (values,) = self._members.split(received, [rows.count])
        for total, value in zip(totals, values, strict=True):
            rows.add(total, value)


class Gather:
    """Every member sends all others what they see of its keys and values at once, in round 1.

    Gradients go back in one exchange too. Needs memory for all the keys that a member sees.
    """

    def __init__(self, call: NodeCall, k_SnD: Tensor, v_SnV: Tensor) -> None:
        """Communicates nothing."""
        self._members = _Members(call, k_SnD, v_SnV)
        self._round, self._own = call.rounds[1], (k_SnD, v_SnV)

    def _others(self) -> list[int]:
        part = self._members.part
        return [member for member in range(part.num_members) if member != part.member]

    def forth(self, number: int, held: KeysValues) -> Exchange:
        """See `KeyExchange.forth`."""
        sent = {member: self._round.returned[member] for member in self._others()}
        return self._members.exchange(
            self._members.flat(
                [(rows.take(held[0]), rows.take(held[1])) for rows in sent.values()]
            ),
            {member: rows.count for member, rows in sent.items()},
            {member: self._round.held[member] for member in sent},
        )

    def unpack(self, number: int, received: Tensor) -> KeysValues:
        """See `KeyExchange.unpack`; rows of members 0..R-1 in turn."""
        others = self._others()
        pairs = self._members.split(received, [self._round.held[member] for member in others])
        pairs.insert(self._members.part.member, self._own)
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys), torch.cat(values)

    def back(self, number: int, gradients: Sequence[KeysValues]) -> Exchange:
        """See `KeyExchange.back`."""
        own_member, others = self._members.part.member, self._others()
        totals = []
        for place, own in enumerate(self._own):
            held = self._round.held
            total = own.new_zeros(sum(held), *own.shape[1:], dtype=lse_dtype(own.dtype))
            for block, pair in zip(self._round.blocks, gradients, strict=True):
                block.kv_rows.add(total, pair[place])
            totals.append(total.split(held))
        pairs = [(dk, dv) for dk, dv in zip(*totals, strict=True)]
        self._kept = pairs.pop(own_member)
        dtype = self._own[0].dtype
        return self._members.exchange(
            self._members.flat([(dk.to(dtype), dv.to(dtype)) for dk, dv in pairs]),
            {member: self._round.held[member] for member in others},
            {member: self._round.returned[member].count for member in others},
        )

    def add(self, number: int, received: Tensor, totals: KeysValues) -> None:
        """See `KeyExchange.add`."""
        for total, value in zip(totals, self._kept, strict=True):
            total.add_(value)
        sent = [self._round.returned[member] for member in self._others()]
        pairs = self._members.split(received, [rows.count for rows in sent])
        for rows, pair in zip(sent, pairs, strict=True):
            for total, value in zip(totals, pair, strict=True):
                rows.add(total, value)
