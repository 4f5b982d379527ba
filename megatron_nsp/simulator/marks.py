"""Which nodes keep their attention output instead of computing it again (NSP paper, section 4.2.2).

Saving a node costs its ranks bytes and spares them its attention in the recomputation. Nodes are
taken root to leaf, long samples first: their attention costs most for each byte. A node is saved by
all of its ranks or by none, so it counts against the fullest of them.
"""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan import Plan
from megatron_nsp.planner.cost import ModelShape
from megatron_nsp.tree import Node


@dataclass(frozen=True)
class SavedNodes:
    """The marks of a plan.

    Attributes:
        nodes: saved nodes, by micro-batch.
        rank_bytes: most bytes any rank keeps in a micro-batch.
    """

    nodes: frozenset[tuple[int, Node]]
    rank_bytes: float


def saved_bytes_per_token(shape: ModelShape) -> int:
    """Bytes that all layers keep for one saved token: the output of its heads, and their LSE."""
    layer = shape.num_heads * (shape.head_dim * shape.bytes_per_element + 4)
    return shape.num_layers * layer


def mark_saved(plan: Plan, shape: ModelShape, budget_bytes: float) -> SavedNodes:
    """Marks the nodes to save.

    Args:
        plan: the plan.
        shape: the model.
        budget_bytes: most bytes that a rank may keep in a micro-batch.
    """
    per_token, saved, most = saved_bytes_per_token(shape), set(), 0.0
    for micro_batch in range(plan.num_micro_batches):
        held = np.zeros(plan.tree.num_ranks)
        for node in sorted(plan.active_nodes(micro_batch)):
            stream = int(plan.lengths[plan.samples_of(node, micro_batch)].sum())
            ranks = plan.tree.ranks(node)
            members = slice(ranks.start, ranks.stop)
            share = -(-stream // plan.tree.degree(node)) * per_token
            if float(held[members].max()) + share <= budget_bytes:
                held[members] += share
                saved.add((micro_batch, node))
        most = max(most, float(held.max()))
    return SavedNodes(frozenset(saved), most)
