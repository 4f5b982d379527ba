"""The nested groups live and die with Megatron's own, and are made as its flags say."""

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_nsp.mcore import parallel_state
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.testing.ranks import run_ranks

TREE = SPTree(4, (1, 2, 4))
CPU = torch.device("cpu")
# Rank 1 of the second of two domains; every rank creates all groups, in this order.
RANK, DOMAINS = 5, [[0, 1, 2, 3], [4, 5, 6, 7]]
CREATED = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1), (4, 5), (2, 3), (6, 7)]
OWN = [(4, 5, 6, 7), (4, 5)]


class StandIns:
    """Megatron's functions around the groups of one rank of eight; writes down their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created: list[dict[str, Any]] = []
        self.destroyed: list[Any] = []
        self.warmed_up: list[torch.device] = []
        self.nccl: list[tuple[str, dict[str, Any]]] = []
        for place, name, stand_in in (
            (mpu, "create_group", self.create_group),
            (mpu, "get_nccl_options", self.get_nccl_options),
            (mpu, "initialize_model_parallel", lambda **_: None),
            (mpu, "destroy_model_parallel", lambda: self.destroyed.append("Megatron's own")),
            (dist, "get_rank", lambda: RANK),
            (dist, "destroy_process_group", self.destroyed.append),
            (torch.cuda, "current_device", lambda: 3),
            (parallel_state, "_domains", lambda: DOMAINS),
            (NestedGroups, "warm_up", lambda _, device: self.warmed_up.append(device)),
        ):
            monkeypatch.setattr(place, name, stand_in)
        # JSON is YAML too, and Megatron installs no reader of the latter.
        monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=json.load))

    def create_group(self, ranks: list[int], **options: Any) -> tuple[int, ...]:
        self.created.append({"ranks": tuple(ranks), **options})
        return tuple(ranks)

    def get_nccl_options(self, name: str, configs: dict[str, Any]) -> str:
        self.nccl.append((name, configs))
        return "the options"


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    yield StandIns(monkeypatch)
    parallel_state.configure(None)
    parallel_state._NESTED_GROUPS = None


def test_every_group_gets_the_time_out_and_the_options_of_the_job(
    stand_ins: StandIns, tmp_path: Path
) -> None:
    config = tmp_path / "nccl.yaml"
    config.write_text('{"nsp": {"min_ctas": 2}, "dp": {"min_ctas": 9}}')
    parallel_state.install(TREE)
    mpu.initialize_model_parallel(
        distributed_timeout_minutes=7,
        nccl_communicator_config_path=str(config),
        high_priority_stream_groups=["nsp"],
    )
    assert [call.pop("ranks") for call in stand_ins.created] == CREATED
    for call in stand_ins.created:
        assert call["timeout"] == timedelta(minutes=7)
        assert call["pg_options"] == "the options"
    ((name, configs),) = stand_ins.nccl
    assert configs[name] == {"min_ctas": 2, "is_high_priority_stream": True}
    assert stand_ins.warmed_up == [torch.device("cuda", 3)]


def test_groups_go_with_megatrons_own_and_can_be_made_again(stand_ins: StandIns) -> None:
    parallel_state.install(TREE)
    for _ in range(2):
        mpu.initialize_model_parallel()
        assert parallel_state.get_nested_groups().num_groups == len(OWN)
        mpu.destroy_model_parallel()
        assert stand_ins.destroyed == [*OWN, "Megatron's own"]
        stand_ins.destroyed.clear()
        with pytest.raises(RuntimeError, match="nested groups do not exist"):
            parallel_state.get_nested_groups()
    assert len(stand_ins.created) == 2 * len(CREATED)


def test_groups_of_a_patched_megatron_are_not_made_twice(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mpu,
        "initialize_model_parallel",
        lambda **_: parallel_state.initialize_nested_groups(TREE, timeout_minutes=7),
    )
    parallel_state.install(TREE)
    mpu.initialize_model_parallel(distributed_timeout_minutes=7)
    assert len(stand_ins.created) == len(CREATED)


def test_destroyed_groups_are_gone_from_torch() -> None:
    assert run_ranks(2, _members_before_and_after) == [([0, 1], None)] * 2


def _members_before_and_after(rank: int) -> tuple[list[int], list[int] | None]:
    groups = NestedGroups.create(SPTree(2, (1, 2)), [range(2)])
    groups.warm_up(CPU)
    parallel_state._NESTED_GROUPS = groups
    group = groups.group(groups.tree.node(2, 0))
    before = dist.get_process_group_ranks(group)
    parallel_state.destroy_nested_groups()
    try:
        return before, dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return before, None
