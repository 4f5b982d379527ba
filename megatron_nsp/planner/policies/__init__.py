"""Baseline policies, one a module, in the same model and with the same results as the search.

A policy is one of two kinds:

* a `PassPolicy` places the samples of one micro-batch; `passes.assign` spreads a batch over passes
  for it, under the token budget;
* a `BatchPolicy` spreads the batch over passes by itself.

`POLICIES` holds those that do not depend on the tree; the static ones are made for each degree.
"""

import numpy as np

from megatron_nsp.plan import IntArray
from megatron_nsp.planner.bounds import lower_bound_us
from megatron_nsp.planner.evening import evened
from megatron_nsp.planner.experts import search_with_experts
from megatron_nsp.planner.passes import Batch, BatchPolicy, PassPolicy, by_passes
from megatron_nsp.planner.placement import Placement
from megatron_nsp.planner.policies.algorithm_1 import place_algorithm_1
from megatron_nsp.planner.policies.basp import plan_basp
from megatron_nsp.planner.policies.disjoint_lpt import place_disjoint_lpt
from megatron_nsp.planner.policies.dynamic_cp import place_dynamic_cp
from megatron_nsp.planner.policies.flexsp import plan_flexsp, plan_flexsp_10s
from megatron_nsp.planner.policies.flexsp_milp import solver_modules
from megatron_nsp.planner.policies.static import place_static
from megatron_nsp.planner.policies.two_level import place_two_level
from megatron_nsp.planner.problem import PassProblem
from megatron_nsp.planner.score import SampleTimes
from megatron_nsp.planner.search import search
from megatron_nsp.tree import SPTree

__all__ = [
    "CHEAP",
    "BatchPolicy",
    "PassPolicy",
    "check_can_train",
    "is_hopeless",
    "policies_of",
    "portfolio_of",
]


def _finish(problem: PassProblem, placement: Placement) -> Placement:
    """The last touches of the search, once the passes are settled."""
    return search_with_experts(problem, evened(problem, placement))


POLICIES: dict[str, BatchPolicy] = {
    "search": by_passes(search, refine=_finish),
    "two-level": by_passes(place_two_level),
    "disjoint-lpt": by_passes(place_disjoint_lpt),
    "megatron-dynamic-cp": by_passes(place_dynamic_cp),
    "basp": plan_basp,
    "algorithm-1": by_passes(place_algorithm_1),
    "flexsp": plan_flexsp,
    "flexsp-10s": plan_flexsp_10s,
}
"""Policies by name."""

CHEAP = ("two-level", "disjoint-lpt", "megatron-dynamic-cp", "basp")
"""Those that belong to the portfolio, beside static sequence parallelism at every degree."""

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


def _static(degree: int) -> BatchPolicy:
    return by_passes(lambda problem: place_static(problem, degree))


def portfolio_of(tree: SPTree) -> dict[str, BatchPolicy]:
    """The policies that the search must not lose to, by name."""
    static = {f"static-{degree}": _static(degree) for degree in tree.degrees}
    return static | {name: POLICIES[name] for name in CHEAP}


def policies_of(tree: SPTree) -> dict[str, BatchPolicy]:
    """Everything that can plan alone.

    'leaves' and 'root' are static at the two ends, and 'dp', data parallel only, is 'leaves'.
    """
    ends = {"leaves": _static(1), "dp": _static(1), "root": _static(tree.max_degree)}
    return {"search": POLICIES["search"]} | portfolio_of(tree) | POLICIES | ends


def is_hopeless(name: str, batch: Batch, load_us: float) -> bool:
    """Whether a lower bound shows that a policy of the portfolio cannot beat a load.

    Policies that choose degrees by themselves are bounded by their mean work and their longest
    sample, two levels by the bound over their two degrees; of other policies nothing is known.

    Args:
        name: the policy.
        batch: the samples.
        load_us: load to beat, without bias.
    """
    times = batch.times
    if name.startswith("static-"):
        column = times.tree.degrees.index(int(name.removeprefix("static-")))
        return _bound_at_us(times, np.full(len(times.lengths), column)) >= load_us
    if name == "megatron-dynamic-cp":
        fits = batch.problem.fits_alone()
        return bool(fits.any(axis=1).all()) and (
            _bound_at_us(times, fits.argmax(axis=1)) >= load_us
        )
    if name == "two-level" and len(times.tree.degrees) > 2:
        return lower_bound_us(times.at_degrees((0, len(times.tree.degrees) - 1))) >= load_us
    return False


def _bound_at_us(times: SampleTimes, column: IntArray) -> float:
    """Mean work of a rank, or the longest sample, of samples at these degrees."""
    rows = np.arange(len(column))
    sample_us = times.fwd_us[rows, column] + times.bwd_us[rows, column]
    work_us = float((sample_us * np.array(times.tree.degrees)[column]).sum())
    return max(work_us / times.tree.num_ranks, float(sample_us.max(initial=0.0)))
