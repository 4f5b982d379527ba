"""Baseline policies, one a module, in the same model and with the same results as the search.

A policy is one of two kinds:

* a `MicroBatchPolicy` places the samples of one micro-batch; `micro_batches.assign` spreads a batch
  over micro-batches for it, under the token budget;
* a `BatchPolicy` spreads the batch over micro-batches by itself.

A policy of the portfolio also says what it cannot beat (`Rival`), so that it need not be worked out
where the search is better for sure. `POLICIES` holds those that do not depend on the tree; the
static ones are made for each degree.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_nsp.cost.bounds import work_bound_us
from megatron_nsp.cost.score import SampleTimes
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner.policies.algorithm_1 import place_algorithm_1
from megatron_nsp.planner.policies.basp import plan_basp
from megatron_nsp.planner.policies.disjoint_lpt import place_disjoint_lpt
from megatron_nsp.planner.policies.dynamic_cp import place_dynamic_cp
from megatron_nsp.planner.policies.flexsp import plan_flexsp, plan_flexsp_10s
from megatron_nsp.planner.policies.flexsp_milp import solver_modules
from megatron_nsp.planner.policies.static import place_static
from megatron_nsp.planner.policies.two_level import place_two_level
from megatron_nsp.planner.search.even_out import evened
from megatron_nsp.planner.search.experts import search_with_experts
from megatron_nsp.planner.search.micro_batches import (
    Assignment,
    BatchPolicy,
    BatchProblem,
    MicroBatchPolicy,
    as_batch_policy,
)
from megatron_nsp.planner.search.placement import Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem
from megatron_nsp.planner.search.search import search

__all__ = [
    "CHEAP",
    "BatchPolicy",
    "MicroBatchPolicy",
    "Rival",
    "check_can_train",
    "policies_of",
    "portfolio_of",
]


def _finish(problem: MicroBatchProblem, placement: Placement) -> Placement:
    """The last touches of the search, once the micro-batches are settled."""
    return search_with_experts(problem, evened(problem, placement))


POLICIES: dict[str, BatchPolicy] = {
    "search": as_batch_policy(search, refine=_finish),
    "two-level": as_batch_policy(place_two_level),
    "disjoint-lpt": as_batch_policy(place_disjoint_lpt),
    "megatron-dynamic-cp": as_batch_policy(place_dynamic_cp),
    "basp": plan_basp,
    "algorithm-1": as_batch_policy(place_algorithm_1),
    "flexsp": plan_flexsp,
    "flexsp-10s": plan_flexsp_10s,
}
"""Policies by name."""

TIMED = ("flexsp-10s",)
"""Those that the clock stops: two ranks would make different plans of one batch."""


def check_can_train(name: str) -> None:
    """Refuses policies that cannot plan the steps of a training run.

    Raises:
        ValueError: the ranks would disagree, or a package that the policy needs is not installed.
    """
    if name in TIMED:
        raise ValueError(f"{name} is stopped by the clock: ranks would disagree about their plans")
    if name == "flexsp":
        solver_modules()


Bound = Callable[[BatchProblem], float]
"""Microseconds, without bias, that a policy's step takes at least."""


@dataclass(frozen=True)
class Rival:
    """A policy of the portfolio; a `BatchPolicy` itself.

    Attributes:
        place: the policy.
        bound_us: what its steps take at least; 0 if nothing is known.
    """

    place: BatchPolicy
    bound_us: Bound = lambda batch: 0.0

    def __call__(self, batch: BatchProblem, max_micro_batches: int) -> Assignment:
        """Places a batch."""
        return self.place(batch, max_micro_batches)


def _static(degree: int) -> Rival:
    def bound_us(batch: BatchProblem) -> float:
        k = batch.times.tree.degrees.index(degree)
        return _bound_at_us(batch.times, np.full(len(batch.lengths), k))

    return Rival(as_batch_policy(lambda problem: place_static(problem, degree)), bound_us)


def _two_level_bound_us(batch: BatchProblem) -> float:
    """The bound over its two degrees; of fewer than three it is the search's, which says little."""
    last = len(batch.times.tree.degrees) - 1
    return work_bound_us(batch.times.at_degrees((0, last))) if last > 1 else 0.0


def _dynamic_cp_bound_us(batch: BatchProblem) -> float:
    fits = batch.in_one_micro_batch.fits_alone()
    return _bound_at_us(batch.times, fits.argmax(axis=1)) if fits.any(axis=1).all() else 0.0


def _bound_at_us(times: SampleTimes, column: IntArray) -> float:
    """Mean work of a rank, or the longest sample, of samples at these degrees."""
    rows, degrees = np.arange(len(column)), np.array(times.tree.degrees)[column]
    sample_us = times.fwd_us[rows, column] + times.bwd_us[rows, column]
    work_us = float((sample_us * degrees).sum())
    if times.expert_us is not None:
        others = np.where(times.shares_experts[column], 1 / degrees - 1 / times.expert_degree, 0.0)
        sample_us = sample_us - times.expert_us.sum(axis=1) * others
    return max(work_us / times.tree.num_ranks, float(sample_us.max(initial=0.0)))


CHEAP = {
    "two-level": Rival(POLICIES["two-level"], _two_level_bound_us),
    "disjoint-lpt": Rival(POLICIES["disjoint-lpt"]),
    "megatron-dynamic-cp": Rival(POLICIES["megatron-dynamic-cp"], _dynamic_cp_bound_us),
    "basp": Rival(POLICIES["basp"]),
}
"""Those of the portfolio, beside static sequence parallelism at every degree."""


def portfolio_of(tree: SPTree) -> dict[str, Rival]:
    """The policies that the search must not lose to, by name."""
    return {f"static-{degree}": _static(degree) for degree in tree.degrees} | CHEAP


def policies_of(tree: SPTree) -> dict[str, BatchPolicy]:
    """Everything that can plan alone.

    'leaves' and 'root' are static at the two ends, and 'dp', data parallel only, is 'leaves'.
    """
    ends = {"leaves": _static(1), "dp": _static(1), "root": _static(tree.max_degree)}
    return {"search": POLICIES["search"], **portfolio_of(tree), **POLICIES, **ends}
