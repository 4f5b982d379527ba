"""Which samples keep their attention output instead of computing it again (NSP paper, 4.2.2).

Saving costs a node's ranks bytes and spares them its attention in the recomputation. Nodes are
taken root to leaf and the samples of a node longest first, as they lie in its stream: attention of
long samples costs most for each byte. Members of a node hold equal slices of its stream, so of its
saved head the first members hold more; the fullest member decides.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_nsp.layout import slice_bounds
from megatron_nsp.plan import CARRIED, Plan
from megatron_nsp.planner.cost import ModelShape


@dataclass(frozen=True, eq=False)
class SavedSamples:
    """The marks of a plan.

    Attributes:
        is_saved: `[n]` whether a sample's attention output is kept.
        rank_bytes: most bytes any rank keeps in a micro-batch.
    """

    is_saved: npt.NDArray[np.bool_]
    rank_bytes: float

    def recomputed(self, plan: Plan) -> Plan:
        """The plan without the saved samples: what runs again."""
        return replace(plan, micro_batch=np.where(self.is_saved, CARRIED, plan.micro_batch))


def saved_bytes_per_token(shape: ModelShape) -> int:
    """Bytes that all layers keep for one saved token: the output of its heads, and their LSE."""
    layer = shape.num_heads * (shape.head_dim * shape.bytes_per_element + 4)
    return shape.num_layers * layer


def mark_saved(plan: Plan, shape: ModelShape, budget_bytes: float) -> SavedSamples:
    """Marks the samples to save.

    Args:
        plan: the plan.
        shape: the model.
        budget_bytes: most bytes that a rank may keep in a micro-batch.
    """
    per_token, most = saved_bytes_per_token(shape), 0.0
    is_saved = np.zeros(plan.num_samples, dtype=bool)
    for micro_batch in range(plan.num_micro_batches):
        held = np.zeros(plan.tree.num_ranks)
        for node in sorted(plan.active_nodes(micro_batch)):
            samples = plan.samples_of(node, micro_batch)
            ends = np.cumsum(plan.lengths[samples])
            bounds = slice_bounds(int(ends[-1]), plan.tree.degree(node))
            # [samples, members] tokens that each member saves with so many samples of the head.
            tokens = np.clip(ends[:, None], bounds[:-1], bounds[1:]) - bounds[:-1]
            ranks = plan.tree.ranks(node)
            members = slice(ranks.start, ranks.stop)
            after = held[members] + tokens * per_token
            fits = (after <= budget_bytes).all(axis=1)
            num_saved = int(fits.sum())  # a longer head never holds less
            if num_saved:
                held[members] = after[num_saved - 1]
                is_saved[samples[:num_saved]] = True
        most = max(most, float(held.max()))
    return SavedSamples(is_saved, most)
