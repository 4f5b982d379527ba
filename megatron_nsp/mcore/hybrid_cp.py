"""Megatron's hybrid context parallelism as a policy: its own scheduler, called as it is.

`BalancedCPScheduler` of Megatron-Core gives every sample the least power of two of ranks that
holds it, packs samples into sets of ranks, enlarges sets until no rank is idle, and closes a group
when the ranks are about equally busy. Ranks run the samples of a group without waiting for one
another; between two groups there is a barrier. So a group becomes a micro-batch of ours, and
a set of ranks a node:

    scheduler   group 0         {0} {1 2} {3 4 5 6} {7}            sets need not be aligned
    plan        micro-batch 0   {3 4 5 6} -> 4:0    {1 2} -> 2:2    {0} -> 1:6    {7} -> 1:7

Sets are laid side by side from rank 0 on, the largest first, so each begins at a multiple of its
size: an aligned node, and no two share a rank. A set larger than the tree's largest degree keeps
only so many of its ranks.

Megatron runs the samples of a set one after the other, each in memory by itself. In a
micro-batch of ours they are there together, so what exceeds the token budget goes to another one of
the same sets. What does not fit the fixed number of them is carried to the next step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import Assignment, BatchPolicy, BatchProblem, MicroBatchState, Placement


@dataclass(frozen=True)
class _Ranks:
    """All that the scheduler asks of a process group."""

    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


@dataclass(frozen=True)
class RankSet:
    """Ranks that share their samples.

    Attributes:
        num_ranks: how many the scheduler chose.
        samples: positions in the batch, in the order they run.
    """

    num_ranks: int
    samples: tuple[int, ...]


def plan_hybrid_cp(batch: BatchProblem, max_micro_batches: int) -> Assignment:
    """The scheduler's groups as micro-batches.

    Raises:
        ValueError: the tree is not of powers of two, or the scheduler gives up.
    """
    tree, num_samples = batch.times.tree, len(batch.lengths)
    if any(degree & (degree - 1) for degree in tree.degrees):
        raise ValueError(
            f"policy megatron-hybrid-cp needs degrees that are powers of two, got "
            f"{list(tree.degrees)}"
        )
    placements: list[tuple[IntArray, Placement]] = []
    for group in scheduled_groups(batch):
        placements += _placements_of(batch, nodes_of(tree, group))
    return Assignment.of_placements(num_samples, placements[:max_micro_batches])


MEGATRON_POLICIES: Mapping[str, BatchPolicy] = {"megatron-hybrid-cp": plan_hybrid_cp}
"""Policies that need Megatron."""


def scheduled_groups(batch: BatchProblem) -> list[list[RankSet]]:
    """What Megatron's scheduler makes of a batch: its groups, in order, as sets of ranks.

    Without a token budget a rank may hold the longest sample.

    Raises:
        ValueError: the scheduler gives up.
    """
    if len(batch.lengths) == 0:
        return []
    limit = batch.token_budget or int(batch.lengths[0])
    scheduler = BalancedCPScheduler(limit, _Ranks(batch.times.tree.num_ranks))
    numbered = list(enumerate(batch.lengths.tolist()))
    try:
        _, groups = scheduler.get_groups_and_subsamples(numbered, None)
    except (AssertionError, IndexError, KeyError) as error:
        raise ValueError(
            f"Megatron's hybrid context parallel scheduler gives up on {len(numbered)} samples of "
            f"{batch.lengths[-1]} to {batch.lengths[0]} tokens, {limit} a rank: {error}"
        ) from error
    return [_rank_sets(samples_of_rank) for samples_of_rank in groups]


def _rank_sets(samples_of_rank: list[list[int]]) -> list[RankSet]:
    """Ranks with the same samples, as one set; the first rank decides the order."""
    sizes: dict[tuple[int, ...], int] = {}
    for samples in samples_of_rank:
        if samples:
            sizes[tuple(samples)] = sizes.get(tuple(samples), 0) + 1
    return [RankSet(num_ranks, samples) for samples, num_ranks in sizes.items()]


@dataclass(frozen=True)
class PlacedSet:
    """A node of the tree in a micro-batch, and its samples.

    Attributes:
        column: column of the node's degree.
        index: index of the node among those of the degree.
        samples: positions in the batch, in the order they run.
    """

    column: int
    index: int
    samples: tuple[int, ...]


def nodes_of(tree: SPTree, group: list[RankSet]) -> list[PlacedSet]:
    """The sets of a group on aligned nodes, the largest first."""
    nodes, first_rank = [], 0
    for ranks in sorted(group, key=lambda one: -one.num_ranks):
        column = max(k for k, degree in enumerate(tree.degrees) if degree <= ranks.num_ranks)
        degree = tree.degrees[column]
        assert first_rank % degree == 0 and first_rank + degree <= tree.num_ranks, f"{first_rank=}"
        nodes.append(PlacedSet(column, first_rank // degree, ranks.samples))
        first_rank += degree
    return nodes


def _placements_of(
    batch: BatchProblem, nodes: list[PlacedSet]
) -> Iterator[tuple[IntArray, Placement]]:
    """The micro-batches of a group: samples of a node share one as far as the budget lets them."""
    shares: list[list[tuple[PlacedSet, list[int]]]] = []
    for node in nodes:
        for number, samples in enumerate(_portions(batch, node)):
            if number == len(shares):
                shares.append([])
            shares[number].append((node, samples))
    for share in shares:
        members = np.sort(np.concatenate([samples for _, samples in share]))
        state = MicroBatchState(batch.take(members).in_one_micro_batch)
        for node, samples in share:
            places = np.searchsorted(members, np.sort(samples))
            state.add(node.column, places, np.full(len(places), node.index))
        yield members, state.placement()


def _portions(batch: BatchProblem, node: PlacedSet) -> Iterator[list[int]]:
    """The node's samples in their order, cut where the next would exceed the token budget."""
    degree = batch.times.tree.degrees[node.column]
    portion: list[int] = []
    tokens = 0
    for sample in node.samples:
        length = int(batch.lengths[sample])
        is_over = batch.token_budget is not None and tokens + length > batch.token_budget * degree
        if portion and is_over:
            yield portion
            portion, tokens = [], 0
        portion.append(sample)
        tokens += length
    yield portion
