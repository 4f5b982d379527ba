"""Dense work of one layer on all ranks at once: projections, MLP and experts."""

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.plan.arrays import FloatArray
from megatron_nsp.plan.phases import Pass
from megatron_nsp.simulator.active_paths import ActivePaths
from megatron_nsp.simulator.attention import Clocks


def run_dense(
    paths: ActivePaths, pass_: Pass, clocks: Clocks, cost: CostModel
) -> tuple[FloatArray, FloatArray]:
    """Runs one pass of dense work of one layer, moving the clocks.

    Ranks that share experts wait for one another, then do an equal part of all their tokens' expert
    work: the router is taken to spread tokens evenly.

    Returns:
        `[P]` time each compute queue was busy, and time it waited for others with its experts.
    """
    layers, group = cost.shape.num_layers, cost.shape.expert_degree
    expert_us = cost.expert_us_per_token(pass_) / layers
    own_us = cost.dense_us_per_token(pass_) / layers - expert_us
    clocks.compute_us = clocks.compute_us + paths.tokens * own_us
    together: FloatArray = paths.tokens.reshape(-1, group).mean(axis=1, dtype=np.float64)
    waited_us = np.zeros_like(clocks.compute_us)
    if group > 1 and expert_us > 0:
        arrived_us: FloatArray = clocks.compute_us.reshape(-1, group).max(axis=1)
        together_us: FloatArray = np.repeat(arrived_us, group)
        waited_us = together_us - clocks.compute_us
        clocks.compute_us = together_us
    shared_us: FloatArray = np.repeat(together, group) * expert_us
    clocks.compute_us = clocks.compute_us + shared_us
    return paths.tokens * own_us + shared_us, waited_us
