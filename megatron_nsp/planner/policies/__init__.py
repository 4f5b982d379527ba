"""Baseline policies, one a module, in the same model and with the same results as the search.

A policy is one of two kinds:

* a `PassPolicy` places the samples of one micro-batch; `passes.assign` spreads a batch over passes
  for it, under the token budget;
* a `BatchPolicy` spreads the batch over passes by itself.

`POLICIES` holds those that do not depend on the tree; the static ones are made for each degree.
"""

from megatron_nsp.planner.bounds import lower_bound_us
from megatron_nsp.planner.evening import evened
from megatron_nsp.planner.passes import BatchPolicy, PassPolicy, by_passes
from megatron_nsp.planner.policies.disjoint_lpt import place_disjoint_lpt
from megatron_nsp.planner.policies.static import place_static
from megatron_nsp.planner.policies.two_level import place_two_level
from megatron_nsp.planner.score import SampleTimes
from megatron_nsp.planner.search import search
from megatron_nsp.tree import SPTree

__all__ = ["CHEAP", "BatchPolicy", "PassPolicy", "is_hopeless", "policies_of", "portfolio_of"]

POLICIES: dict[str, BatchPolicy] = {
    "search": by_passes(search, refine=evened),
    "two-level": by_passes(place_two_level),
    "disjoint-lpt": by_passes(place_disjoint_lpt),
}
"""Policies by name."""

CHEAP = ("two-level", "disjoint-lpt")
"""Those that belong to the portfolio, beside static sequence parallelism at every degree."""


def _static(degree: int) -> BatchPolicy:
    return by_passes(lambda problem: place_static(problem, degree))


def portfolio_of(tree: SPTree) -> dict[str, BatchPolicy]:
    """The policies that the search must not lose to, by name."""
    static = {f"static-{degree}": _static(degree) for degree in tree.degrees}
    return static | {name: POLICIES[name] for name in CHEAP}


def policies_of(tree: SPTree) -> dict[str, BatchPolicy]:
    """Everything that can plan alone; 'leaves' and 'root' are static at the two ends."""
    ends = {"leaves": _static(1), "root": _static(tree.max_degree)}
    return {"search": POLICIES["search"]} | portfolio_of(tree) | POLICIES | ends


def is_hopeless(name: str, times: SampleTimes, load_us: float) -> bool:
    """Whether a lower bound shows that a policy of the portfolio cannot beat a load.

    Static sequence parallelism is bounded by its mean work and its longest sample, two levels by
    the bound over their two degrees; of other policies nothing is known.

    Args:
        name: the policy.
        times: the samples.
        load_us: load to beat, without bias.
    """
    if name.startswith("static-"):
        k = times.tree.degrees.index(int(name.removeprefix("static-")))
        sample_us = times.fwd_us[:, k] + times.bwd_us[:, k]
        mean_us = float(sample_us.sum()) * times.tree.degrees[k] / times.tree.num_ranks
        return max(mean_us, float(sample_us.max(initial=0.0))) >= load_us
    if name == "two-level" and len(times.tree.degrees) > 2:
        return lower_bound_us(times.at_degrees((0, len(times.tree.degrees) - 1))) >= load_us
    return False
