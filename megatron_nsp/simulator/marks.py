"""Which samples keep their attention output instead of computing it again (NSP paper, 4.2.2).

Saving costs a node's ranks bytes and spares them its attention in the recomputation. Nodes are
taken root to leaf and the samples of a node longest first: attention of long samples costs most for
each byte. A sample is saved if every member of its node has room for the part that it holds.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_nsp.plan import CARRIED, Plan
from megatron_nsp.planner.cost import ModelShape
from megatron_nsp.split import slice_bounds


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
    layer = shape.num_heads * (shape.value_dim * shape.bytes_per_element + 4)
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
            # [samples + 1, members] tokens that each member holds of the first so many samples.
            before = np.clip(np.append(0, ends)[:, None], bounds[:-1], bounds[1:]) - bounds[:-1]
            parts = np.diff(before, axis=0) * per_token
            ranks = plan.tree.ranks(node)
            own = held[ranks.start : ranks.stop]
            for sample, part in zip(samples.tolist(), parts, strict=True):
                if (own + part <= budget_bytes).all():
                    own += part
                    is_saved[sample] = True
        most = max(most, float(held.max()))
    return SavedSamples(is_saved, most)
