"""The search against the best plan there is, found by a mixed-integer solver on small instances.

Where the load stays above the lower bound, this says whether a better plan exists.
"""

import random

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import lil_array

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.planner import plan_batch
from tests.unit.planner_cases import cluster, moe, workstation


def best_load_us(lengths: list[int], cost: CostModel, time_limit_s: float) -> tuple[float, float]:
    """Load of the best plan without node latency, and a bound on it that the solver proved.

    One 0/1 variable a sample and node; every rank is below the slowest forward and the slowest
    backward pass, whose sum is minimised. Experts' work is done by the node's whole group.
    """
    tree, times = cost.tree, cost.sample_times(np.array(lengths))
    nodes = list(tree.nodes())
    size = len(lengths) * len(nodes) + 2
    rows, low, high = [], [], []

    def row(entries: dict[int, float], least: float, most: float) -> None:
        rows.append(entries)
        low.append(least)
        high.append(most)

    for j in range(len(lengths)):
        row({j * len(nodes) + u: 1.0 for u in range(len(nodes))}, 1.0, 1.0)
    for which, each_us in enumerate((times.fwd_us, times.bwd_us)):
        for rank in range(tree.num_ranks):
            entries = {size - 2 + which: -1.0}
            for u, node in enumerate(nodes):
                degree = tree.degree(node)
                k, group = tree.degrees.index(degree), cost.shape.expert_degree
                shares = degree < group
                in_group = rank // group == tree.ranks(node)[0] // group
                for j in range(len(lengths)):
                    load_us = each_us[j, k] * (rank in tree.ranks(node))
                    if shares and times.expert_us is not None:
                        expert_us = times.expert_us[j, which]
                        load_us -= expert_us / degree * (rank in tree.ranks(node))
                        load_us += expert_us / group * in_group
                    if load_us:
                        entries[j * len(nodes) + u] = load_us / 1e3
            row(entries, -np.inf, 0.0)
    matrix = lil_array((len(rows), size))
    for i, entries in enumerate(rows):
        for place, value in entries.items():
            matrix[i, place] = value
    cost_of = np.zeros(size)
    cost_of[-2:] = 1.0
    integrality = np.ones(size)
    integrality[-2:] = 0
    found = milp(
        cost_of,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=integrality,
        bounds=(0, np.append(np.ones(size - 2), [np.inf, np.inf])),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-4},
    )
    return 1e3 * found.fun, 1e3 * found.mip_dual_bound


@pytest.mark.parametrize("seed", range(6))
def test_on_small_instances_nothing_much_better_exists(seed: int) -> None:
    rng = random.Random(seed)
    cost = cluster(4, 4) if seed % 2 else workstation(6, (1, 3, 6))
    lengths = [int(40_000 ** (0.4 + 0.6 * rng.random())) for _ in range(9)]
    result = plan_batch(lengths, cost.tree, cost, policy="search")
    best_us, proved_us = best_load_us(lengths, cost, time_limit_s=20.0)
    bias_us = cost.profile.bias_us
    assert result.report.bound_us - bias_us <= best_us * (1 + 1e-6)
    found_us = result.report.load_no_latency_us - bias_us
    # The search also minds node latency, which the solver does not count.
    latency_us = result.report.load_us - result.report.load_no_latency_us
    assert found_us <= 1.02 * best_us + latency_us, (found_us / best_us, proved_us / best_us)


@pytest.mark.parametrize("seed", range(5))
def test_with_shared_experts_the_best_plan_stays_above_the_bound_too(seed: int) -> None:
    rng, cost = random.Random(seed), moe(4, 2, (1, 2, 4))
    lengths = [int(60_000 ** (0.5 + 0.5 * rng.random())) for _ in range(9)]
    result = plan_batch(lengths, cost.tree, cost, policy="search")
    best_us, proved_us = best_load_us(lengths, cost, time_limit_s=20.0)
    assert result.report.bound_us <= best_us * (1 + 1e-6)
    latency_us = result.report.load_us - result.report.load_no_latency_us
    found_us = result.report.load_no_latency_us
    assert found_us <= 1.01 * best_us + latency_us, (found_us / best_us, proved_us / best_us)
    assert proved_us > 1.005 * result.report.bound_us  # a gap that no plan closes
