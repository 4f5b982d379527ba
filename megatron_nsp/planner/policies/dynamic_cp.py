"""Dynamic context parallelism: every sample at the least degree that memory allows.

What Megatron-Core describes publicly as dynamic context parallelism: a sample is given as few ranks
as hold it, groups of different sizes run side by side in a micro-batch, and samples are packed into
the groups of their size so that these have equally much to do. Its own scheduler for whole steps is
the policy megatron-hybrid-cp (mcore/hybrid_cp.py); this is the idea alone, in our cost model.

The degree follows from the token budget; without one every sample fits a single rank. Each degree
gets the groups that its tokens fill, large degrees first, and ranks left over go to the degrees
whose groups have most to do. Samples go to the groups of their degree longest first, each to the
least loaded with room. Small samples for which no ranks are left wait for the next micro-batch.
"""

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.policies.disjoint_lpt import grow, place_on_groups
from megatron_nsp.planner.search.placement import Placement, exact_sums
from megatron_nsp.planner.search.problem import MicroBatchProblem


def place_dynamic_cp(problem: MicroBatchProblem) -> Placement:
    """All samples at their memory-minimum degree, in disjoint groups."""
    column = memory_minimum_columns(problem)
    time_ns = problem.total_ns[np.arange(problem.num_samples), column]
    degree_ns = exact_sums(column, time_ns, len(problem.degrees))
    groups = grow(problem, _least_groups(problem, column), degree_ns)
    return place_on_groups(problem, column, groups)[0].placement()


def memory_minimum_columns(problem: MicroBatchProblem) -> IntArray:
    """`[n]` the least degree at which each sample fits the token budget by itself."""
    column: IntArray = problem.fits_alone().argmax(axis=1)
    return column


def _least_groups(problem: MicroBatchProblem, column: IntArray) -> IntArray:
    """`[K+1]` groups that hold the tokens of each degree, as far as there are ranks for them."""
    degrees, budget = problem.degrees, problem.token_budget
    groups = (np.bincount(column, minlength=len(degrees)) > 0).astype(np.int64)
    if budget is not None:
        tokens = exact_sums(column, problem.lengths, len(degrees))
        groups = -(-tokens // (budget * degrees))
    spare = problem.tree.num_ranks
    for k in range(len(degrees) - 1, -1, -1):
        groups[k] = min(int(groups[k]), spare // int(degrees[k]))
        spare -= int(groups[k] * degrees[k])
    return groups
