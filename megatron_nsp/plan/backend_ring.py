"""Keys go round in a circle: Ulysses with one ring member, a ring with as many as ranks, else USP.

In round r a member computes with the keys of the member r places before it, while those of the next
round are on their way from its neighbour. In backward the gradients of the keys go straight back to
where these came from. With one member nothing goes round: heads alone are divided (Ulysses, arXiv
2309.14509). What lies between is USP (Fang and Zhao, arXiv 2405.07719).
"""

from collections.abc import Mapping
from typing import override

from megatron_nsp.plan.backend import Backend, NodeHeads
from megatron_nsp.plan.chunks import Dealing
from megatron_nsp.plan.ring_rows import KeyMask, ring_block


class Ring(Backend):
    """Heads inside a member, and keys passed on from member to member."""

    name = "ring"
    choices = ("ulysses", "ring", "usp")

    @override
    def member_counts(self, heads: NodeHeads) -> Mapping[str, tuple[int, ...]]:
        degree, alone = heads.degree, (1,) * heads.divide
        return {
            "ulysses": alone,
            "ring": (degree,),
            "usp": (degree // max(heads.member_sizes),),
            "auto": (*alone, heads.fewest_members, degree),
        }

    @override
    def label(self, degree: int, num_members: int) -> str:
        if num_members == 1:
            return "ulysses"
        return "ring" if num_members == degree else "usp"

    @override
    def under(self, mask: KeyMask) -> str:
        return self.name if mask.window_left is None else "gather"

    @override
    def num_rounds(self, num_members: int) -> int:
        return num_members

    @override
    def num_peers(self, num_members: int) -> int:
        return 1

    @override
    def keys_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        return dealing.member_tokens[(member - number + 1) % dealing.num_members]

    @override
    def gradients_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        source = (member - number) % dealing.num_members
        return len(ring_block(dealing, member, source, mask.is_causal).kv_rows)
