"""Pure tests of the fill: the tail evens out both passes, whatever a backward pass repeats."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_nsp.planner import MicroBatchProblem, MicroBatchState
from megatron_nsp.planner.search.fill import fill_leaves, fill_level
from tests.unit.planner_cases import workstation

FOUR = workstation(4, (1, 2, 4))


def begun(dense_ratio: float, seed: int) -> MicroBatchState:
    """Four ranks of equal dense and unequal attention work, and a tail that can even it out.

    Attention takes half a forward more than dense work backward: 2.5 against 2 times as long where
    nothing is recomputed, 3.5 against 3 where all is; 1 and 1.5 stand for models that wait for
    exchanges of their experts, which take as long in both passes.
    """
    rng = np.random.default_rng(seed)
    tail = np.sort(np.concatenate([rng.integers(200, 600, 24), rng.integers(5, 40, 200)]))[::-1]
    lengths = np.concatenate([[4000] * 4, tail])
    dense_ns = np.concatenate([[600_000, 1_300_000, 1_900_000, 2_000_000], tail * 1000])
    attention_ns = np.concatenate([[1_200_000, 600_000, 100_000, 0], 2 * tail**2])
    bwd_ns = np.rint(dense_ratio * dense_ns + (dense_ratio + 0.5) * attention_ns).astype(np.int64)
    fwd_ns, bwd_ns = ((dense_ns + attention_ns)[:, None].repeat(3, 1), bwd_ns[:, None].repeat(3, 1))
    problem = replace(
        MicroBatchProblem.from_times(FOUR.sample_times(lengths), None),
        fwd_ns=fwd_ns,
        bwd_ns=bwd_ns,
        total_ns=fwd_ns + bwd_ns,
        latency_ns=np.zeros(3, dtype=np.int64),
    )
    state = MicroBatchState(problem)
    state.add(0, np.arange(4), np.arange(4))
    return state


@pytest.mark.parametrize("dense_ratio", [1.0, 1.5, 2.0, 3.0])
def test_the_ranks_are_level_in_both_passes_whatever_dense_work_takes_backward(
    dense_ratio: float,
) -> None:
    """What a step takes longer than with equal ranks, as a share of their forward time."""
    excess = []
    for seed in range(20):
        state = begun(dense_ratio, seed)
        problem = state.problem
        assert not len(fill_leaves(state, np.arange(4, problem.num_samples)))
        level_ns = problem.total_ns[:, 0].sum() / 4
        excess.append((state.load_ns() - level_ns) / (problem.fwd_ns[:, 0].sum() / 4))
    assert np.mean(excess) < 0.006


def test_without_a_rest_the_level_is_the_slowest_rank_of_either_pass() -> None:
    level_ns, _ = fill_level(np.array([7, 3, 1]), np.array([2, 4, 11]), 0, 0)
    assert level_ns == 7 + 11
    assert fill_level(np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64), 0, 0)[0] == 0
