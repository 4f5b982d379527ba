"""All ring members send one another what they see of their keys and values, at once.

One exchange before the only kernel call, which nothing hides; in backward another one returns the
gradients. Sliding windows need it: a window reaches over the keys of several members.
"""

from collections.abc import Mapping
from typing import override

from megatron_nsp.plan.backend import Backend, NodeHeads
from megatron_nsp.plan.chunks import Dealing
from megatron_nsp.plan.ring_rows import KeyMask, seen_keys


class Gather(Backend):
    """Heads inside a member, and keys gathered from all other members."""

    name = "gather"
    choices = ("gather",)

    @override
    def member_counts(self, heads: NodeHeads) -> Mapping[str, tuple[int, ...]]:
        counts = (heads.fewest_members, heads.degree)
        return {"gather": counts, "auto": counts}

    @override
    def num_rounds(self, num_members: int) -> int:
        return min(num_members, 2)

    @override
    def num_peers(self, num_members: int) -> int:
        return num_members - 1

    @override
    def has_call(self, number: int, num_members: int) -> bool:
        return number == self.num_rounds(num_members) - 1

    @override
    def keys_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        others = _others(dealing, member)
        return sum(len(seen_keys(dealing, other, member, mask)) for other in others)

    @override
    def gradients_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        others = _others(dealing, member)
        return sum(len(seen_keys(dealing, member, other, mask)) for other in others)


def _others(dealing: Dealing, member: int) -> list[int]:
    return [other for other in range(dealing.num_members) if other != member]
