"""Which samples keep their attention output instead of computing it again (NSP paper, 4.2.2)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_nsp.tree import Node


@dataclass(frozen=True)
class SavedSamples:
    """The marks of a plan: how many samples at the head of each node's stream are saved.

    Attributes:
        num_saved: samples by micro-batch and node; none for a node that is not there.
    """

    num_saved: Mapping[tuple[int, Node], int] = field(default_factory=dict)

    def of_node(self, micro_batch: int, node: Node) -> int:
        """Saved samples of a node."""
        return self.num_saved.get((micro_batch, node), 0)


NOTHING_SAVED = SavedSamples()
