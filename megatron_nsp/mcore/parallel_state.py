"""The nested groups of a job, beside Megatron's own parallel state.

Megatron keeps its groups in module state that lives from `initialize_model_parallel` to
`destroy_model_parallel`. The tree's groups live exactly as long: `configure` names the tree, and
either Megatron is patched with `patches/` to make and destroy them, or `install` wraps the two
functions.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.groups import NestedGroups

PG_NAME = "nsp"
"""Name of the tree's groups in `--nccl-communicator-config-path` and
`--high-priority-stream-groups`."""

_TREE: SPTree | None = None
_NESTED_GROUPS: NestedGroups | None = None


def configure(tree: SPTree | None) -> None:
    """Names the tree whose groups `initialize_model_parallel` makes; None for a run without.

    Call it before Megatron initialises model parallelism.
    """
    global _TREE
    _TREE = tree


def configured_tree() -> SPTree | None:
    """The tree named last."""
    return _TREE


def get_nested_groups() -> NestedGroups:
    """The tree's groups of this rank.

    Raises:
        RuntimeError: model parallelism is not initialised, or was destroyed.
    """
    if _NESTED_GROUPS is None:
        raise RuntimeError(
            "nested groups do not exist: model parallelism is not initialised, or Megatron is "
            "neither patched to make them nor wrapped with install()"
        )
    return _NESTED_GROUPS


def nested_groups_are_initialized() -> bool:
    """Whether the tree's groups exist."""
    return _NESTED_GROUPS is not None


def initialize_nested_groups(
    tree: SPTree,
    timeout_minutes: int,
    nccl_config_path: str | None = None,
    high_priority_groups: Sequence[str] | None = None,
) -> NestedGroups:
    """Creates the tree's groups and warms them up; a collective call for all ranks of the job.

    Args:
        tree: the SP tree of every domain.
        timeout_minutes: `--distributed-timeout-minutes`.
        nccl_config_path: `--nccl-communicator-config-path`.
        high_priority_groups: `--high-priority-stream-groups`.
    """
    global _NESTED_GROUPS
    assert _NESTED_GROUPS is None, "nested groups exist already"
    options = mpu.get_nccl_options(PG_NAME, _nccl_configs(nccl_config_path, high_priority_groups))

    def new_group(ranks: list[int]) -> Any:
        return mpu.create_group(
            ranks,
            timeout=timedelta(minutes=timeout_minutes),
            pg_options=options,
            group_desc="NESTED_SEQUENCE_PARALLEL_GROUP",
        )

    _NESTED_GROUPS = NestedGroups.create(tree, _domains(), new_group)
    _NESTED_GROUPS.warm_up(torch.device("cuda", torch.cuda.current_device()))
    return _NESTED_GROUPS


def destroy_nested_groups() -> None:
    """Destroys the tree's groups, if there are any."""
    global _NESTED_GROUPS
    if _NESTED_GROUPS is not None:
        _NESTED_GROUPS.destroy()
        _NESTED_GROUPS = None


def install(tree: SPTree) -> None:
    """Makes the tree's groups come right after Megatron's own and go with them.

    A patched Megatron does so by itself; the wrappers then find nothing left to do.
    """
    configure(tree)
    initialize, destroy = mpu.initialize_model_parallel, mpu.destroy_model_parallel

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        if not nested_groups_are_initialized():
            initialize_nested_groups(
                tree,
                kwargs.get("distributed_timeout_minutes", 30),
                kwargs.get("nccl_communicator_config_path"),
                kwargs.get("high_priority_stream_groups"),
            )

    def destroy_model_parallel() -> None:
        destroy_nested_groups()
        destroy()

    mpu.initialize_model_parallel = initialize_model_parallel
    mpu.destroy_model_parallel = destroy_model_parallel


def _domains() -> list[list[int]]:
    """The global ranks of every data-parallel domain, in one order on every rank."""
    own = torch.distributed.get_process_group_ranks(mpu.get_data_parallel_group())
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    return [list(domain) for domain in sorted({tuple(domain) for domain in gathered})]


def _nccl_configs(
    config_path: str | None, high_priority_groups: Sequence[str] | None
) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    if config_path is not None:
        import yaml  # type: ignore[import-untyped]  # Megatron too asks for it only here

        with open(config_path) as stream:
            configs = yaml.safe_load(stream)
    for name in high_priority_groups or ():
        mpu.overwrite_nccl_comm_cfgs(configs, name, ("is_high_priority_stream", True))
    return configs
