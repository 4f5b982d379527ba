"""Whose plans a job runs: those of a policy, or recorded ones."""

import os

from megatron_nsp.config import NSPConfig, flag
from megatron_nsp.mcore.hybrid_cp import MEGATRON_POLICIES
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import check_can_train, policy_names
from megatron_nsp.steps.replay import PlanReplay
from megatron_nsp.steps.sampler import StepSizes

_REPLAY_PREFIX = "file:"


def replayed_path(config: NSPConfig) -> str | None:
    """The file of recorded plans that a job runs; None where a policy makes them."""
    if not config.policy.startswith(_REPLAY_PREFIX):
        return None
    return config.policy.removeprefix(_REPLAY_PREFIX)


def check_policy(
    config: NSPConfig, tree: SPTree, size_of: StepSizes, heads: tuple[int, int]
) -> None:
    """Checks that the policy exists and can plan a training run.

    Args:
        config: the settings.
        tree: the SP tree.
        size_of: the size of each step.
        heads: query and key/value heads on a tensor-parallel rank.

    Raises:
        ValueError: it does not or cannot, or its recorded plans are for another job.
    """
    path = replayed_path(config)
    if path is not None:
        if config.record_plans and os.path.realpath(config.record_plans) == os.path.realpath(path):
            raise ValueError(f"{flag('record_plans')} {path} would overwrite the plans it replays")
        PlanReplay(path, tree, size_of, config.token_budget, heads)
        return
    names = policy_names(tree, MEGATRON_POLICIES)
    if config.policy not in names:
        raise ValueError(
            f"{flag('policy')} must be file:PATH or one of {', '.join(names)}, got {config.policy}"
        )
    try:
        check_can_train(config.policy)
    except ValueError as error:
        raise ValueError(f"{flag('policy')}: {error}") from error
