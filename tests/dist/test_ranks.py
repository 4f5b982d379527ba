"""Ranks forked for tests and for `megatron-nsp verify`: what ends them, and when."""

import os
import time
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_nsp.testing.ranks import RankError, run_ranks


def _state_of_the_other(rank: int) -> str:
    """The state of rank 1's process, as the kernel says, when it has long had nothing to do."""
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        return ""
    time.sleep(0.5)
    return Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rank_that_is_done_stays_until_all_are() -> None:
    """Others may still connect to it: making a group fails where a member is gone."""
    assert run_ranks(2, _state_of_the_other)[0] == "S"


def _leave(rank: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 died without a word"):
        run_ranks(2, _leave)


def test_forking_ranks_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(2, _rank) == [0, 1]


def _rank(rank: int) -> int:
    return rank
