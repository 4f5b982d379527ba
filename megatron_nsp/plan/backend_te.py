"""Transformer Engine's own context parallelism: its ring and its exchange of heads.

TE deals samples as our rings do, but wants all chunks of a sample to be equally long, and every
rank of the node is a member. What it sends is not predicted, and not seen by our queue.
"""

from collections.abc import Mapping
from typing import override

from megatron_nsp.plan.backend import Backend, NodeHeads
from megatron_nsp.plan.chunks import Dealing
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.ring_rows import KeyMask


class TeRing(Backend):
    """TE's ring."""

    name = "te-p2p"
    choices = ("te-p2p",)
    is_native = True
    gives_lse = False
    serves_windows = False
    serves_sinks = False
    fills_samples = True

    @override
    def member_counts(self, heads: NodeHeads) -> Mapping[str, tuple[int, ...]]:
        return {self.name: (heads.degree,)}

    @override
    def check_members(self, degree: int, num_members: int) -> None:
        super().check_members(degree, num_members)
        if num_members != degree or degree == 1:
            raise ValueError(
                f"{self.name} divides a node among all of its ranks, 2 at least: a node of degree "
                f"{degree} cannot have {num_members} of them"
            )

    @override
    def num_rounds(self, num_members: int) -> int:
        return 1

    @override
    def num_peers(self, num_members: int) -> int:
        return 0

    @override
    def phases(self, pass_: Pass, number: int, num_members: int) -> tuple[Phase, ...]:
        return (Phase.NATIVE,)

    @override
    def keys_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        raise AssertionError("what Transformer Engine sends is not predicted")

    @override
    def gradients_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        raise AssertionError("what Transformer Engine sends is not predicted")

    @override
    def priced_as(self, num_members: int) -> tuple[int, str]:
        """Our ring: it moves the same, but for the rows that fill samples up."""
        return num_members, "ring"


class TeUlysses(TeRing):
    """TE's exchange of heads, which repeats none for ranks that would share it."""

    name = "te-a2a"
    choices = ("te-a2a",)
    repeats_heads = False
    serves_windows = True

    @override
    def member_counts(self, heads: NodeHeads) -> Mapping[str, tuple[int, ...]]:
        divides = heads.num_heads % heads.degree == 0 and heads.num_kv_heads % heads.degree == 0
        return {self.name: (heads.degree,) * divides}

    @override
    def priced_as(self, num_members: int) -> tuple[int, str]:
        """Our Ulysses."""
        return 1, "ring"
