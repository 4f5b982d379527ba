"""The static input layout: who holds which tokens before a plan deals them, and the way over.

A conventional loader knows one fixed degree N and no plan. The P ranks of the domain form P/N
static groups, aligned blocks of N ranks. The k-th sample of a micro-batch, in the order of the
batch, goes to group k mod P/N. A group's samples, concatenated in that order, are its stream of S
tokens, and rank r of the group holds [floor(S*r/N), floor(S*(r+1)/N)). There are no filler rows: a
rank may hold nothing.

    4 ranks, static degree 2; samples a (5 tokens), b (2), c (4), on the nodes 4:0, 1:3 and 2:0

             static layout                      plan layout
        group 0   rank 0   a0 a1 a2 a3          a0 c0 c1
                  rank 1   a4 c0 c1 c2 c3       a1 c2 c3
        group 1   rank 2   b0                   a2
                  rank 3   b1                   a3 a4 b0 b1

One all-to-all among the P ranks goes from one layout to the other. Both ends know its order from
the plan alone: rank i sends to rank j the tokens that i holds in the first layout and j in the
second, by their number in the concatenated samples of the batch.

        rank 1 sends    to 0: c0 c1    to 1: c2 c3    to 2: -    to 3: a4
        rank 3 receives from 0: a3     from 1: a4     from 2: b0    from 3: b1

The way back is the same with the two layouts exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.layout import NodeSlice, RankLayout, rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import ULYSSES, rank_bounds
from megatron_nsp.plan.tree import SPTree


def static_groups(num_ranks: int, degree: int) -> SPTree:
    """The static groups, as the roots of a tree.

    Args:
        num_ranks: ranks of the domain (P).
        degree: ranks of a static group (N).

    Raises:
        ValueError: the degree does not divide the ranks.
    """
    return SPTree(num_ranks, tuple(sorted({1, degree})))


def static_layout(plan: Plan, rank: int, degree: int, micro_batch: int = 0) -> RankLayout:
    """What `rank` holds of a micro-batch in the static layout.

    Of the plan this takes the samples of the micro-batch and their lengths, not their nodes.

    Args:
        plan: the plan.
        rank: rank in the domain.
        degree: ranks of a static group.
        micro_batch: micro-batch of the step.

    Raises:
        ValueError: the degree does not divide the ranks.
    """
    groups = static_groups(plan.tree.num_ranks, degree)
    index, rank_in_group = divmod(rank, degree)
    samples = _in_order(plan, micro_batch)[index :: groups.num_nodes(0)]
    if not len(samples):
        return RankLayout(rank, (), 0)
    lengths = plan.lengths[samples]
    part = NodeSlice(
        node=groups.node(degree, index),
        rank_in_node=rank_in_group,
        samples=samples,
        lengths=lengths,
        split=ULYSSES,
        bounds=rank_bounds(lengths, degree, ULYSSES),
        buffer_start=0,
    )
    return RankLayout(rank, (part,), 0)


def _in_order(plan: Plan, micro_batch: int) -> IntArray:
    """The samples of a micro-batch in the order of the batch."""
    return np.flatnonzero(plan.micro_batch == micro_batch)


@dataclass(frozen=True, eq=False)
class ExchangedRows:
    """One rank's rows in one layout, in the order in which they are sent or received.

    Attributes:
        rows: `[n]` the buffer row of each token: by the rank that holds it in the other layout,
            then by token number.
        counts: `[P]` how many of them are exchanged with each rank.
        buffer_tokens: rows of the buffer, filler rows included.
    """

    rows: IntArray
    counts: tuple[int, ...]
    buffer_tokens: int

    @classmethod
    def of(
        cls, own: RankLayout, others: Sequence[RankLayout], lengths: IntArray, num_ranks: int
    ) -> "ExchangedRows":
        """The rows of `own`, matched with what ranks hold in the other layout.

        Args:
            own: the rank in one layout.
            others: the ranks that hold samples of `own` in the other layout; more do no harm.
            lengths: `[n]` tokens of every sample of the batch.
            num_ranks: ranks of the domain (P).
        """
        offsets = np.cumsum(lengths) - lengths
        runs = sorted(
            (int(offsets[sample]) + start, layout.rank)
            for layout in others
            for sample, start, _ in layout.segments
        )
        run_starts, holders = np.array(runs, dtype=np.int64).reshape(-1, 2).T
        numbers = own.token_numbers(lengths)
        other_ranks = holders[np.searchsorted(run_starts, numbers, side="right") - 1]
        return cls(
            rows=np.lexsort((numbers, other_ranks)),
            counts=tuple(np.bincount(other_ranks, minlength=num_ranks).tolist()),
            buffer_tokens=own.buffer_tokens,
        )


@dataclass(frozen=True, eq=False)
class ReshardMap:
    """What one rank sends and receives between the static and the plan layout of a micro-batch.

    Attributes:
        rank: the rank in the domain.
        static: its rows in the static layout.
        plan: its rows in the plan layout.
    """

    rank: int
    static: ExchangedRows
    plan: ExchangedRows

    @classmethod
    def build(
        cls, plan: Plan, micro_batch: int, rank: int, static_degree: int, row_multiple: int = 1
    ) -> "ReshardMap":
        """The map of one rank, from the plan alone.

        Args:
            plan: the plan.
            micro_batch: micro-batch of the step.
            rank: rank in the domain.
            static_degree: ranks of a static group.
            row_multiple: as in `layout.rank_layout`.

        Raises:
            ValueError: the static degree does not divide the ranks.
        """
        static = static_layout(plan, rank, static_degree, micro_batch)
        planned = rank_layout(plan, rank, micro_batch, row_multiple)
        num_ranks, in_order = plan.tree.num_ranks, _in_order(plan, micro_batch)
        place = np.searchsorted(in_order, np.array(_samples_of(planned), dtype=np.int64))
        groups = set((place % (num_ranks // static_degree)).tolist())
        nodes = {plan.node_of(sample) for sample in _samples_of(static)}
        senders = {g * static_degree + r for g in groups for r in range(static_degree)}
        holders = {r for node in nodes for r in plan.tree.ranks(node)}
        return cls.between(
            static,
            planned,
            [static_layout(plan, r, static_degree, micro_batch) for r in sorted(senders)],
            [rank_layout(plan, r, micro_batch, row_multiple) for r in sorted(holders)],
            plan,
        )

    @classmethod
    def between(
        cls,
        static: RankLayout,
        planned: RankLayout,
        senders: Sequence[RankLayout],
        holders: Sequence[RankLayout],
        plan: Plan,
    ) -> "ReshardMap":
        """The map of one rank between two layouts of the same tokens.

        Args:
            static: the rank in the static layout.
            planned: the rank in the plan layout.
            senders: the ranks that hold samples of `planned` in the static layout.
            holders: the ranks that hold samples of `static` in the plan layout.
            plan: the plan.
        """
        lengths, num_ranks = plan.lengths, plan.tree.num_ranks
        return cls(
            rank=static.rank,
            static=ExchangedRows.of(static, holders, lengths, num_ranks),
            plan=ExchangedRows.of(planned, senders, lengths, num_ranks),
        )


def _samples_of(layout: RankLayout) -> list[int]:
    return sorted({segment.sample for segment in layout.segments})
