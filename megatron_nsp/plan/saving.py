"""Which samples save their attention output, and which recompute it (NSP paper, 4.2.2).

Saving costs the ranks of a node bytes and spares them the node's attention and exchanges where a
layer is recomputed. Samples are marked root to leaf and, in a node, longest first: attention of
long samples costs most for each byte. A stream is in that order, so what is saved is its head. All
ranks of a node must save the same samples, but they hold unequal parts of them: the cut is where
the first of them has no more room. Marks follow from the plan and the budget alone, so every rank
works out those of all ranks.

What a rank of a node saves of these samples, in each layer that is recomputed:

    output   its own tokens of them, all H heads of V elements
    LSE      its H/u heads, all their tokens in the stream of its ring member
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.heads import HeadShape
from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.split import Split, rank_bounds
from megatron_nsp.plan.tree import Node


@dataclass(frozen=True)
class SavedSamples:
    """The marks of a plan: how many samples at the head of each node's stream are saved.

    Attributes:
        num_saved: samples by micro-batch and node; none for a node that is not there.
        rank_bytes: most bytes that any rank saves in a micro-batch.
    """

    num_saved: Mapping[tuple[int, Node], int] = field(default_factory=dict)
    rank_bytes: int = 0

    def of_node(self, micro_batch: int, node: Node) -> int:
        """Saved samples of a node."""
        return self.num_saved.get((micro_batch, node), 0)

    def samples(self, plan: Plan) -> IntArray:
        """The saved samples of a plan, by node."""
        saved = [plan.samples_of(node, m)[:n] for (m, node), n in sorted(self.num_saved.items())]
        return np.concatenate([np.zeros(0, dtype=np.int64), *saved])

    def recomputed(self, plan: Plan) -> Plan:
        """The plan without the saved samples: what runs again."""
        micro_batch = plan.micro_batch.copy()
        micro_batch[self.samples(plan)] = CARRIED
        return replace(plan, micro_batch=micro_batch)


NOTHING_SAVED = SavedSamples()


@dataclass(frozen=True)
class SavedSizes:
    """The sizes of what is saved of a token.

    Attributes:
        num_heads: query heads of a rank (H).
        row_bytes: the output of one token, all heads; 0 where the next module holds it anyway.
        lse_bytes: the LSE of one token on one head.
        num_layers: layers of a rank that are recomputed.
    """

    num_heads: int
    row_bytes: int
    lse_bytes: int
    num_layers: int

    @property
    def bytes_per_token(self) -> int:
        """What each rank of a node saves, on average, for each of its own tokens."""
        return self.num_layers * (self.row_bytes + self.num_heads * self.lse_bytes)

    def of_first_samples(self, lengths: IntArray, degree: int, split: Split) -> IntArray:
        """`[degree, n + 1]` bytes that each rank of a node saves of its first 0..n samples.

        Args:
            lengths: `[n]` tokens of the node's samples, in stream order.
            degree: ranks of the node.
            split: how they divide attention.
        """
        ends = np.cumsum(split.deal(lengths).tokens, axis=1)
        ends = np.pad(ends, ((0, 0), (1, 0)))[:, None, :]  # [R, 1, n + 1] in the member's stream
        bounds = rank_bounds(lengths, degree, split)[:, :, None]
        rows = np.clip(ends, bounds[:, :-1], bounds[:, 1:]) - bounds[:, :-1]  # [R, u, n + 1]
        own_heads = self.num_heads // (degree // split.num_members)
        layer_bytes = rows * self.row_bytes + ends * (own_heads * self.lse_bytes)
        saved: IntArray = self.num_layers * layer_bytes.reshape(degree, -1)
        return saved


def mark_saved(plan: Plan, sizes: SavedSizes, budget_bytes: float) -> SavedSamples:
    """Marks the samples to save.

    Args:
        plan: the plan.
        sizes: the sizes of what is saved.
        budget_bytes: most bytes that a rank may save in a micro-batch; may be infinite.
    """
    num_saved, most = {}, 0
    for micro_batch in range(plan.num_micro_batches):
        held = np.zeros(plan.tree.num_ranks, dtype=np.int64)
        for node in plan.active_nodes(micro_batch):
            if not plan.split_of(node, micro_batch).backend.gives_lse:
                continue
            ranks = plan.tree.ranks(node)
            own = held[ranks.start : ranks.stop, None]
            total = own + _of_node(plan, micro_batch, node, sizes)
            # Sample by sample more is saved, so the counts with room everywhere are the first ones.
            count = int((total <= budget_bytes).all(axis=0).sum()) - 1
            held[ranks.start : ranks.stop] = total[:, count]
            if count:
                num_saved[micro_batch, node] = count
        most = max(most, int(held.max()))
    return SavedSamples(num_saved, most)


def saved_bytes(
    plan: Plan, saved: SavedSamples, sizes: SavedSizes, micro_batch: int = 0
) -> IntArray:
    """`[num_ranks]` bytes that each rank saves of the marked samples of a micro-batch."""
    held = np.zeros(plan.tree.num_ranks, dtype=np.int64)
    for node in plan.active_nodes(micro_batch):
        count = saved.of_node(micro_batch, node)
        held[plan.tree.ranks(node)] += _of_node(plan, micro_batch, node, sizes)[:, count]
    return held


def _of_node(plan: Plan, micro_batch: int, node: Node, sizes: SavedSizes) -> IntArray:
    lengths = plan.lengths[plan.samples_of(node, micro_batch)]
    split = plan.split_of(node, micro_batch)
    return sizes.of_first_samples(lengths, plan.tree.degree(node), split)


def unrecomputed_bytes(
    part: NodeSlice, heads: HeadShape, element_bytes: int, lse_bytes: int
) -> int:
    """Bytes that a layer without recomputation holds of a node until backward.

    The queries, keys and values that this rank's heads attend with, their output and its LSE. Where
    tokens are not exchanged for heads (u = 1) the output is that of the layer, which the next
    module holds anyway: it is not counted.

    Args:
        part: the rank's slice of the node.
        heads: the layer's heads.
        element_bytes: size of an element of q, k, v and the output.
        lse_bytes: size of an element of the LSE.
    """
    own_q = heads.num_heads // part.member_ranks
    own_kv = max(heads.num_kv_heads // part.member_ranks, 1)
    width = own_q * heads.head_dim + own_kv * (heads.head_dim + heads.value_dim)
    if part.member_ranks > 1:
        width += own_q * heads.value_dim
    return part.stream_tokens * (width * element_bytes + own_q * lse_bytes)
