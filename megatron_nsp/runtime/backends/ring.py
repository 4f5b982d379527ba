"""Ring members in a circle: in round r the keys of the member r places before are there.

They are passed on from neighbour to neighbour; gradients go back to the keys' own member directly,
in the dtype of the keys, and are summed there in the precision of the LSE.
"""

from collections.abc import Sequence
from typing import override

from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.ring_rows import ring_block
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.backends.blocks import Round, Rounds, Rows, kernel_calls
from megatron_nsp.runtime.backends.members import KeyExchange, KeysValues
from megatron_nsp.runtime.kernels.base import AttentionMask


class Ring(KeyExchange):
    """Passes keys on to the next member, and takes them from the one before."""

    @staticmethod
    @override
    def rounds(part: NodeSlice, mask: AttentionMask) -> Rounds:
        rounds = []
        for number in range(part.num_members):
            source = (part.member - number) % part.num_members
            user = (part.member + number) % part.num_members
            block = ring_block(part.dealing, part.member, source, mask.is_causal)
            used = ring_block(part.dealing, user, part.member, mask.is_causal).kv_rows
            calls = kernel_calls([block], part.stream_tokens, part.member_tokens[source])
            rounds.append(Round(calls, (Rows.of(used, part.stream_tokens),) if number else ()))
        return tuple(rounds)

    @override
    def forth(self, number: int, held: KeysValues) -> Exchange:
        member, sent, received = self.part.member, self._tokens(number - 1), self._tokens(number)
        return self.exchange([held], {member + 1: sent}, {member - 1: received})

    @override
    def unpack(self, number: int, received: Tensor) -> KeysValues:
        return self.pairs(received, [self._tokens(number)])[0]

    @override
    def back(self, number: int, gradients: Sequence[KeysValues]) -> Exchange:
        member, used = self.part.member, self.call.rows[number].blocks
        num_used = sum(block.kv_rows.count for block in used)
        num_returned = self._returned(number).count
        return self.exchange(
            gradients, {member - number: num_used}, {member + number: num_returned}
        )

    @override
    def add(self, number: int, received: Tensor, totals: KeysValues) -> None:
        rows = self._returned(number)
        (values,) = self.pairs(received, [rows.count])
        for total, value in zip(totals, values, strict=True):
            rows.add(total, value)

    def _tokens(self, number: int) -> int:
        """Tokens of the member whose keys are there in a round."""
        part = self.part
        return part.member_tokens[(part.member - number) % part.num_members]

    def _returned(self, number: int) -> Rows:
        (rows,) = self.call.rows[number].returned
        return rows
