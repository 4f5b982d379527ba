"""FlexSP: disjoint groups of different degrees, by integer programming.

Wang et al., ASPLOS 2025. The sorted batch is cut into m consecutive micro-batches whose largest
token sum is as small as can be; in each, samples are sorted into 16 buckets of alike lengths, and
an integer program (flexsp_milp.py) forms groups and shares the buckets out. All m from the least
that the token capacity allows to 4 more are tried, and the least predicted time of the step wins,
each micro-batch with its bias.

Two variants, since the original stops its solver by the clock:

* `flexsp` stops it by the nodes of its tree, which no machine's speed changes, and is the fairer
  opponent: it proves most small programs optimal and comes within a percent or two on 64 ranks;
* `flexsp-10s` stops it after 10 s for each micro-batch. Two ranks would then find different plans,
  so it cannot train.

A further m is left out where its lower bound already says that it cannot win. Beyond the original,
more than 4 further micro-batches are tried as long as no m has worked, and what no m can hold is
carried, the shortest samples first.
"""

from collections.abc import Iterator

import numpy as np

from megatron_nsp.cost.bounds import least_limit_us
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.policies.flexsp_buckets import micro_batch_starts
from megatron_nsp.planner.policies.flexsp_milp import (
    OPTIMAL_WITHIN,
    SolverLimit,
    offered_columns,
    place_in_groups,
)
from megatron_nsp.planner.search.micro_batches import Assignment, BatchProblem
from megatron_nsp.planner.search.placement import Placement

MORE_MICRO_BATCHES = 4
"""Micro-batches tried beyond the least number."""

NODE_LIMIT = SolverLimit(num_nodes=2000)
TIME_LIMIT = SolverLimit(num_nodes=10**9, seconds=10.0)


def plan_flexsp(batch: BatchProblem, max_micro_batches: int) -> Assignment:
    """FlexSP with its solver stopped by counting.

    Raises:
        ValueError: scipy is not installed.
    """
    return _plan(batch, max_micro_batches, NODE_LIMIT)


def plan_flexsp_10s(batch: BatchProblem, max_micro_batches: int) -> Assignment:
    """FlexSP with its solver stopped by the clock, as the original.

    Raises:
        ValueError: scipy is not installed.
    """
    return _plan(batch, max_micro_batches, TIME_LIMIT)


def _plan(batch: BatchProblem, max_micro_batches: int, limit: SolverLimit) -> Assignment:
    """The best number of micro-batches, for as many of the samples as they hold."""
    num_samples, num_kept = len(batch.lengths), len(batch.lengths)
    if batch.token_budget is not None:
        most = batch.token_budget * batch.times.tree.num_ranks * max_micro_batches
        num_kept = int((np.cumsum(batch.lengths) <= most).sum())
    while num_kept:
        kept = np.arange(num_kept)
        placements = _best_placements(batch.take(kept), max_micro_batches, limit)
        if placements is not None:
            return Assignment.of_placements(num_samples, placements)
        num_kept = num_kept * 3 // 4
    return Assignment.of_placements(num_samples, [])


Placements = list[tuple[IntArray, Placement]]
"""Samples and placement of each micro-batch."""


def _best_placements(
    batch: BatchProblem, max_micro_batches: int, limit: SolverLimit
) -> Placements | None:
    """The micro-batches with the least predicted time; None if no number of them works."""
    best: tuple[float, Placements] | None = None
    least = 1
    if batch.token_budget is not None:
        micro_batch_tokens = batch.token_budget * batch.times.tree.num_ranks
        least = -(-int(batch.lengths.sum()) // micro_batch_tokens)
    for num_micro_batches in range(least, min(max_micro_batches, len(batch.lengths)) + 1):
        if best is not None and num_micro_batches > least + MORE_MICRO_BATCHES:
            break
        parts = list(_parts(batch, num_micro_batches))
        below_us = np.inf if best is None else best[0] * (1 - OPTIMAL_WITHIN)
        found = _solve(batch, parts, below_us, limit)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def _parts(batch: BatchProblem, num_micro_batches: int) -> Iterator[IntArray]:
    starts = micro_batch_starts(batch.lengths, num_micro_batches).tolist()
    for start, stop in zip(starts, [*starts[1:], len(batch.lengths)], strict=True):
        yield np.arange(start, stop)


def _solve(
    batch: BatchProblem, parts: list[IntArray], below_us: float, limit: SolverLimit
) -> tuple[float, Placements] | None:
    """Predicted time and placements; None as soon as they cannot be had below that time."""
    bounds_us = [_bound_us(batch.take(part)) for part in parts]
    total_us = sum(bounds_us) + len(parts) * batch.times.bias_us
    placements: Placements = []
    for part, bound_us in zip(parts, bounds_us, strict=True):
        if total_us >= below_us:
            return None
        placement = place_in_groups(batch.take(part).in_one_micro_batch, limit)
        if placement is None:
            return None
        total_us += placement.load_ns / 1000.0 - bound_us
        placements.append((part, placement))
    return total_us, placements


def _bound_us(batch: BatchProblem) -> float:
    """Lower bound of a micro-batch at the degrees on offer; infinite where none fits a sample."""
    degrees = batch.in_one_micro_batch.degrees[:, None]
    sample_us = (batch.times.fwd_us + batch.times.bwd_us).T
    is_offered = batch.in_one_micro_batch.fits_alone().T
    is_offered[: offered_columns(len(degrees)).start] = False
    allowed_us = np.where(is_offered, sample_us, np.inf)
    return least_limit_us(allowed_us, sample_us * degrees, batch.times.tree.num_ranks)
