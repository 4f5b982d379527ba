"""Static sequence parallelism: every sample at one degree.

What a framework with one sequence-parallel size does: the P ranks form P / d groups of d, and
samples go to them longest first, each to the group with least work (LPT).
"""

import numpy as np

from megatron_nsp.planner.search.placement import MicroBatchState, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem


def place_static(problem: MicroBatchProblem, degree: int) -> Placement:
    """All samples at `degree`."""
    state = MicroBatchState(problem)
    state.place_level(problem.tree.degrees.index(degree), np.arange(problem.num_samples))
    return state.placement()
