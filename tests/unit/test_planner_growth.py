"""Planning grows at most with n log n in samples: calls, memory and processor time.

Calls and memory are the same in every run: calls see loops in Python, memory sees arrays of samples
by samples. Time sees everything; it grows with n to the 0.6 to 0.8, so it may be disturbed by a
factor of two. All sizes take turns, so that a machine that slows down slows down all of them.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner import plan_batch
from tests.unit.planner_cases import cluster, drawn, moe

SIZES = (500, 1000, 2000, 4000, 8000, 16000)

FITTED = 4
"""Sizes that the exponent is fitted to, the largest: below them what is the same for all counts."""


def plan(lengths: IntArray, cost: CostModel) -> None:
    """One call as a training step makes it."""
    plan_batch(lengths, cost.tree, cost, compares_all=False)


def calls(works: list[Callable[[], None]]) -> list[float]:
    """Functions called by each, in Python and in C."""
    return [_calls(work) for work in works]


def _calls(work: Callable[[], None]) -> float:
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def peak_bytes(works: list[Callable[[], None]]) -> list[float]:
    """Most memory that each holds at one time, arrays included."""
    return [_peak_bytes(work) for work in works]


def _peak_bytes(work: Callable[[], None]) -> float:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def cpu_s(works: list[Callable[[], None]]) -> list[float]:
    """Processor time of each, the best of five turns."""
    turns_s = [[_cpu_s(work) for work in works] for _ in range(5)]
    return [min(times_s) for times_s in zip(*turns_s, strict=True)]


def _cpu_s(work: Callable[[], None]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def exponent(sizes: tuple[int, ...], amounts: list[float]) -> float:
    """The slope of a straight line through the logarithms of the largest sizes."""
    slope, _ = np.polyfit(np.log(sizes[-FITTED:]), np.log(amounts[-FITTED:]), 1)
    return float(slope)


N_LOG_N = exponent(SIZES, [n * float(np.log(n)) for n in SIZES])
"""1.12: the exponent that n log n has among these sizes."""


@pytest.mark.parametrize("cost", [cluster(), moe(64, 8)], ids=["dense", "experts"])
@pytest.mark.parametrize("amount", [calls, peak_bytes, cpu_s])
def test_planning_grows_at_most_with_n_log_n(cost, amount) -> None:
    pool = drawn("paper-mix", 0, 60_000_000)
    assert len(pool) >= SIZES[-1], len(pool)
    amounts = amount([lambda n=n: plan(pool[:n], cost) for n in SIZES])
    assert exponent(SIZES, amounts) <= N_LOG_N, amounts
