"""Every ring member sends all others what they see of its keys and values at once, in round 1.

Gradients go back in one exchange too. Needs memory for all the keys that a member sees.
"""

from collections.abc import Sequence
from typing import override

import torch
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.ring_rows import gather_blocks, seen_keys
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.backends.blocks import Round, Rounds, Rows, kernel_calls, key_mask
from megatron_nsp.runtime.backends.members import KeyExchange, KeysValues
from megatron_nsp.runtime.kernels.base import AttentionMask, lse_dtype


class Gather(KeyExchange):
    """Holds all keys that its member sees before the only kernel calls, those of round 1."""

    @staticmethod
    @override
    def rounds(part: NodeSlice, mask: AttentionMask) -> Rounds:
        dealing, how, members = part.dealing, key_mask(mask), range(part.num_members)
        held = [seen_keys(dealing, part.member, source, how) for source in members]
        returned = [seen_keys(dealing, user, part.member, how) for user in members]
        counts = tuple(map(len, held))
        blocks = gather_blocks(dealing, part.member, held, how)
        return Round(), Round(
            kernel_calls(blocks, part.stream_tokens, sum(counts)),
            tuple(Rows.of(rows, part.stream_tokens) for rows in returned),
            counts,
        )

    @override
    def forth(self, number: int, held: KeysValues) -> Exchange:
        sent = {member: self._round.returned[member] for member in self.others()}
        return self.exchange(
            [(rows.take(held[0]), rows.take(held[1])) for rows in sent.values()],
            {member: rows.count for member, rows in sent.items()},
            {member: self._round.held[member] for member in sent},
        )

    @override
    def unpack(self, number: int, received: Tensor) -> KeysValues:
        """Rows of members 0..R-1 in turn."""
        pairs = self.pairs(received, [self._round.held[member] for member in self.others()])
        pairs.insert(self.part.member, self.own)
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys), torch.cat(values)

    @override
    def back(self, number: int, gradients: Sequence[KeysValues]) -> Exchange:
        totals = []
        for place, own in enumerate(self.own):
            held = self._round.held
            total = own.new_zeros(sum(held), *own.shape[1:], dtype=lse_dtype(own.dtype))
            for block, pair in zip(self._round.blocks, gradients, strict=True):
                block.kv_rows.add(total, pair[place])
            totals.append(total.split(held))
        pairs = [(dk, dv) for dk, dv in zip(*totals, strict=True)]
        self._own_gradients = pairs.pop(self.part.member)
        dtype = self.own[0].dtype
        return self.exchange(
            [(dk.to(dtype), dv.to(dtype)) for dk, dv in pairs],
            {member: self._round.held[member] for member in self.others()},
            {member: self._round.returned[member].count for member in self.others()},
        )

    @override
    def add(self, number: int, received: Tensor, totals: KeysValues) -> None:
        for total, value in zip(totals, self._own_gradients, strict=True):
            total.add_(value)
        sent = [self._round.returned[member] for member in self.others()]
        pairs = self.pairs(received, [rows.count for rows in sent])
        for rows, pair in zip(sent, pairs, strict=True):
            for total, value in zip(totals, pair, strict=True):
                rows.add(total, value)

    @property
    def _round(self) -> Round:
        return self.call.rows[1]
