"""Which node each sample runs in: the search and the policies it must beat.

`plan_batch` is the way in. The second group of names is what a policy is made of, for policies that
live elsewhere. The rest of the system needs only what is exported here; `make lint` checks it.
"""

from megatron_nsp.planner.policies import BatchPolicy, check_can_train
from megatron_nsp.planner.policies.algorithm_1 import Algorithm1, place_algorithm_1
from megatron_nsp.planner.portfolio import (
    NO_MORE,
    PlanReport,
    PlanResult,
    plan_batch,
    policy_names,
)
from megatron_nsp.planner.search.micro_batches import Assignment, BatchProblem, as_batch_policy
from megatron_nsp.planner.search.placement import MicroBatchState, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem

__all__ = [  # noqa: RUF022 - two groups, see above
    "NO_MORE",
    "PlanReport",
    "PlanResult",
    "check_can_train",
    "plan_batch",
    "policy_names",
    #
    "Algorithm1",
    "Assignment",
    "BatchProblem",
    "BatchPolicy",
    "MicroBatchProblem",
    "MicroBatchState",
    "Placement",
    "as_batch_policy",
    "place_algorithm_1",
]
