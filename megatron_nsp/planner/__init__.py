"""Which node each sample runs in: cost model, lower bound, search and the policies it must beat.

`plan_batch` is the way in; the rest of the system needs only what is exported here.
"""

from megatron_nsp.planner.cost import CostModel
from megatron_nsp.planner.memory import MemoryPlan, token_budget
from megatron_nsp.planner.models import MODELS, Model, known_model
from megatron_nsp.planner.profile import Profile, load_profile
from megatron_nsp.planner.score import PlanScore
from megatron_nsp.planner.shape import ModelShape
from megatron_nsp.planner.split_cost import ulysses_sent_bytes
from megatron_nsp.planner.window import PlanReport, PlanResult, plan_batch, policy_names

__all__ = [
    "MODELS",
    "CostModel",
    "MemoryPlan",
    "Model",
    "ModelShape",
    "PlanReport",
    "PlanResult",
    "PlanScore",
    "Profile",
    "known_model",
    "load_profile",
    "plan_batch",
    "policy_names",
    "token_budget",
    "ulysses_sent_bytes",
]
