"""Which node each sample runs in: cost model, lower bound, search and the policies it must beat.

`plan_batch` is the way in; the rest of the system needs only what is exported here.
"""

from megatron_nsp.planner.cost import CostModel, ModelShape, ulysses_sent_bytes
from megatron_nsp.planner.profile import Profile, load_profile
from megatron_nsp.planner.score import PlanScore
from megatron_nsp.planner.window import PlanReport, PlanResult, plan_batch, policy_names

__all__ = [
    "CostModel",
    "ModelShape",
    "PlanReport",
    "PlanResult",
    "PlanScore",
    "Profile",
    "load_profile",
    "plan_batch",
    "policy_names",
    "ulysses_sent_bytes",
]
