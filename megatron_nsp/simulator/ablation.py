"""Leave-one-out: the search's plans, simulated with one component taken away (NSP paper, Fig. 10).

* recompute: no node saves its attention output;
* overlap: a node ends before the next begins;
* router: samples go to nodes greedily, by Algorithm 1 with a beam of one state;
* cost model: plans are made by forward attention alone, exchanges and dense work cost nothing; a
  profile that holds one model's fitted times has no such parts, so there it cannot be taken away.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import AttentionRate
from megatron_nsp.plan.arrays import FloatArray, IntArray
from megatron_nsp.planner import (
    Algorithm1,
    MicroBatchProblem,
    Placement,
    as_batch_policy,
    place_algorithm_1,
)
from megatron_nsp.simulator.compare import Setting, planned, simulate_with_marks

FULL, COST_MODEL = "full", "cost model"
GREEDY = "greedy"
_GREEDY_RULES = Algorithm1(prefix_size=64, beam_width=1)
_UNLIMITED = 1e30


def not_ablated(cost: CostModel) -> dict[str, str]:
    """The components that cannot be taken away, and why."""
    if cost.profile.fitted is None:
        return {}
    return {
        COST_MODEL: f"profile {cost.profile.name} holds one model's fitted times, not their parts"
    }


def attention_only(cost: CostModel) -> CostModel:
    """A cost model that sees the forward pass of attention alone.

    Raises:
        ValueError: the profile is fitted; see `not_ablated`.
    """
    for component, why in not_ablated(cost).items():
        raise ValueError(f"the {component} cannot be taken away: {why}")
    profile = replace(
        cost.profile,
        attention={
            length: AttentionRate(rate.fwd_flops_per_s, _UNLIMITED)
            for length, rate in cost.profile.attention.items()
        },
        dense_flops_per_s=_UNLIMITED,
        intra_bytes_per_s=_UNLIMITED,
        inter_bytes_per_s=_UNLIMITED,
        latency_us=0.0,
        bias_us=0.0,
        exchanges={},
        merged_elements_per_s=None,
    )
    return replace(cost, profile=profile)


def _place_greedily(problem: MicroBatchProblem) -> Placement:
    return place_algorithm_1(problem, _GREEDY_RULES)


def ablate(batches: Sequence[IntArray], setting: Setting) -> dict[str, FloatArray]:
    """`[batches]` time of each step in microseconds, by what is missing; 'full' is nothing.

    Components that `not_ablated` names are left out.
    """
    greedy = {GREEDY: as_batch_policy(_place_greedily)}
    nested = [planned(lengths, "auto", setting) for lengths in batches]
    plain = replace(setting, execution=replace(setting.execution, overlap=False))
    routed = [planned(each, GREEDY, setting, more_policies=greedy) for each in batches]
    variants = {
        FULL: (setting, nested),
        "recompute": (replace(setting, save_bytes=0.0), nested),
        "overlap": (plain, nested),
        "router": (setting, routed),
    }
    if COST_MODEL not in not_ablated(setting.cost):
        blind = attention_only(setting.cost)
        plans = [planned(each, "search", setting, blind) for each in batches]
        variants[COST_MODEL] = setting, plans
    return {
        name: np.array([simulate_with_marks(plan, how).step_us for plan in plans])
        for name, (how, plans) in variants.items()
    }
