"""Batch-aware sequence parallelism: equal samples, as many groups as samples.

The BASP paper (arXiv 2609.03151, section III): B samples of one length on N ranks go to one group
of K = N / B contiguous ranks each, so that an exchange has K members instead of N. With more
samples than ranks it is data parallelism. Anything else the paper leaves open, and so it is
refused here: samples of different lengths, and B below N that does not divide it.

Over the token budget the batch runs in several micro-batches of equally many samples, each of which
is a batch of its own.
"""

import numpy as np

from megatron_nsp.planner.search.micro_batches import Assignment, BatchProblem
from megatron_nsp.planner.search.placement import MicroBatchState, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem


def plan_basp(batch: BatchProblem, max_micro_batches: int) -> Assignment:
    """Every sample in a group of its own, or all samples at the leaves.

    Raises:
        ValueError: lengths differ, samples and ranks do not divide, the tree lacks the degree, or
            the micro-batches do not hold the batch; one line with the numbers.
    """
    num_samples, lengths = len(batch.lengths), batch.lengths
    if num_samples and lengths[0] != lengths[-1]:
        raise ValueError(
            f"policy basp needs samples of one length, got {lengths[-1]} to {lengths[0]} tokens"
        )
    for num_micro_batches in range(1, min(max_micro_batches, num_samples) + 1):
        if num_samples % num_micro_batches:
            continue
        parts = np.arange(num_samples).reshape(num_micro_batches, -1)
        placements = [_place(batch.take(part).in_one_micro_batch) for part in parts]
        if not any(len(placement.unplaced) for placement in placements):
            return Assignment.of_placements(num_samples, zip(parts, placements, strict=True))
    if num_samples:
        raise ValueError(
            f"policy basp finds no equal micro-batches, at most {max_micro_batches}, that hold "
            f"{num_samples} samples of {lengths[0]} tokens in the token budget of "
            f"{batch.token_budget}"
        )
    return Assignment.of_placements(0, [])


def _place(problem: MicroBatchProblem) -> Placement:
    """Equal samples in one micro-batch."""
    num_samples, tree = problem.num_samples, problem.tree
    degree = 1
    if num_samples <= tree.num_ranks:
        if tree.num_ranks % num_samples:
            raise ValueError(
                f"policy basp cannot give {num_samples} samples equal shares of {tree.num_ranks} "
                "ranks"
            )
        degree = tree.num_ranks // num_samples
        if degree not in tree.degrees:
            raise ValueError(
                f"policy basp needs degree {degree} for {num_samples} samples on {tree.num_ranks} "
                f"ranks, which is not in the chain {list(tree.degrees)}"
            )
    state = MicroBatchState(problem)
    state.place_level(tree.degrees.index(degree), np.arange(num_samples))
    return state.placement()
