"""What a backend is: a way in which the ranks of a node divide its attention, as numbers.

The d ranks of a node are R ring members of u = d / R ranks each. Inside a member the ranks exchange
tokens for heads; a backend says how the members get to one another's keys and values, round by
round, or that a library sees to all of it. Planner, schedule, closed form of the bytes, cost model
and simulator ask a backend these questions and know none by name. The mechanism, with tensors, is
the class of the same name in `runtime/backends`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.chunks import Dealing, equal_chunks, even_chunks
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.ring_rows import KeyMask


@dataclass(frozen=True)
class NodeHeads:
    """A node of some degree and the heads that it is to divide.

    Attributes:
        degree: ranks of the node, at least 2.
        num_heads: query heads on a tensor-parallel rank.
        num_kv_heads: key/value heads on a tensor-parallel rank.
        together: ranks of the domain on one host.
    """

    degree: int
    num_heads: int
    num_kv_heads: int
    together: int = 1

    @property
    def divide(self) -> bool:
        """Whether the heads divide among all ranks."""
        return is_admissible(self.degree, self.num_heads, self.num_kv_heads)

    @property
    def member_sizes(self) -> list[int]:
        """Ranks that a member may have: of one host where the node is on several; ascending."""
        is_inside = self.degree <= self.together and self.together % self.degree == 0
        return [
            ranks
            for ranks in range(1, self.degree + 1)
            if self.degree % ranks == 0
            and (is_inside or self.together % ranks == 0)
            and is_admissible(ranks, self.num_heads, self.num_kv_heads)
        ]

    @property
    def fewest_members(self) -> int:
        """The fewest ring members that may be, two at least."""
        return self.degree // max(ranks for ranks in self.member_sizes if ranks < self.degree)


class Backend(ABC):
    """A way of dividing attention; holds no state.

    Attributes:
        name: what plans and profiles call it.
        choices: what users call it, one name or more for different numbers of ring members.
        is_native: whether a library runs the whole node, communication and all, out of sight of our
            queue and on accelerators alone.
        fills_samples: whether samples are filled up to chunks that are equally long, which only a
            causal mask hides.
        gives_lse: whether the LSE of the output is known, so that both can be saved.
        repeats_heads: whether several ranks may have the same key/value head.
        serves_windows: whether layers may have a sliding window.
        serves_sinks: whether layers may have attention sinks.
    """

    name: ClassVar[str]
    choices: ClassVar[tuple[str, ...]]
    is_native: ClassVar[bool] = False
    fills_samples: ClassVar[bool] = False
    gives_lse: ClassVar[bool] = True
    repeats_heads: ClassVar[bool] = True
    serves_windows: ClassVar[bool] = True
    serves_sinks: ClassVar[bool] = True

    @abstractmethod
    def member_counts(self, heads: NodeHeads) -> Mapping[str, tuple[int, ...]]:
        """How many ring members a node may have, most liked first, by what users call it.

        What is under 'auto' is worth a try where the backend is chosen node by node.
        """

    def check_members(self, degree: int, num_members: int) -> None:
        """Checks that a node can have so many ring members.

        Raises:
            ValueError: they do not divide its ranks; the message names both numbers.
        """
        if num_members < 1 or degree % num_members:
            raise ValueError(f"a node of degree {degree} cannot have {num_members} ring members")

    def check_heads(self, degree: int, num_heads: int, num_kv_heads: int) -> None:
        """Checks what the backend asks of heads, beside that they divide inside a member.

        Raises:
            ValueError: it cannot divide them; the message names the numbers.
        """
        if not self.repeats_heads and (num_heads % degree or num_kv_heads % degree):
            raise ValueError(
                f"{self.name} divides heads, and repeats none: {num_heads} query and "
                f"{num_kv_heads} key/value heads are no multiples of the degree {degree}"
            )

    def label(self, degree: int, num_members: int) -> str:
        """What users call a node of this degree with so many ring members."""
        return self.name

    def deal(self, lengths: IntArray, num_members: int) -> Dealing:
        """Samples of these lengths, dealt to ring members."""
        deal = equal_chunks if self.fills_samples else even_chunks
        return deal(lengths, num_members)

    def under(self, mask: KeyMask) -> str:
        """The name of the backend that serves a layer with this mask in its place."""
        return self.name

    @abstractmethod
    def num_rounds(self, num_members: int) -> int:
        """Rounds of a pass: one, and one more each time that keys get around."""

    @abstractmethod
    def num_peers(self, num_members: int) -> int:
        """Members to which a member sends keys and values in each round after the first."""

    def has_call(self, number: int, num_members: int) -> bool:
        """Whether a round has a kernel call; rounds that have one have equal work."""
        return True

    def phases(self, pass_: Pass, number: int, num_members: int) -> tuple[Phase, ...]:
        """The phases of a round, in order."""
        returned = (Phase.RETURN,) if pass_ is Pass.BWD and number else ()
        is_last = number == self.num_rounds(num_members) - 1
        return (Phase.PROLOGUE, Phase.COMPUTE, *returned, *(Phase.EPILOGUE,) * is_last)

    @abstractmethod
    def keys_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        """Rows of keys that a rank of a member sends in the prologue of a round after the first."""

    @abstractmethod
    def gradients_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        """Rows of gradients of keys that a rank of a member returns after such a round."""

    def priced_as(self, num_members: int) -> tuple[int, str]:
        """The ring members and the name of the backend whose times stand for this one's."""
        return num_members, self.name
