"""A lower bound on the time of any plan, to report how far a plan is from the best possible.

No plan is faster than the least M for which every sample has a degree that takes at most M, and the
work of all samples at their cheapest such degrees fits into P ranks times M:

    sum over j of  min over {d: c(L_j, d) <= M, ceil(L_j / d) <= token budget} of d c(L_j, d)
        <=  P M

c(L, d) is the time of a sample at degree d in both passes, dense work included, without the latency
of nodes: how many nodes are active is the plan's choice, so that time is no bound. The bound holds
for any number of micro-batches: each pass holds its samples' c, and the passes' times add up.
"""

import numpy as np

from megatron_nsp.planner.score import FloatArray, SampleTimes


def lower_bound_us(times: SampleTimes, token_budget: int | None = None) -> float:
    """The lower bound, in microseconds, without the bias of the micro-batches.

    Args:
        times: the samples' times.
        token_budget: the most tokens a rank may hold in a micro-batch; None = no limit.
    """
    if len(times.lengths) == 0:
        return 0.0
    degrees, num_ranks = np.array(times.tree.degrees), times.tree.num_ranks
    cost_us = times.fwd_us + times.bwd_us
    if token_budget is not None:
        is_over = times.lengths[:, None] > token_budget * degrees
        cost_us = np.where(is_over, np.inf, cost_us)
    work_us = cost_us * degrees
    cheapest_us = work_us.min(axis=1)
    # Neither this much work nor this long a sample can be avoided, whatever M is.
    least_us = max(_total(cheapest_us) / num_ranks, float(cost_us.min(axis=1).max()))
    is_settled = np.where(cost_us <= least_us, work_us, np.inf).min(axis=1) <= cheapest_us
    settled_us = _total(cheapest_us[is_settled])
    cost_us, work_us = cost_us[~is_settled], work_us[~is_settled]

    def least_mean_us(limit_us: float) -> float:
        allowed_us = np.where(cost_us <= limit_us, work_us, np.inf).min(axis=1)
        return (settled_us + _total(allowed_us)) / num_ranks

    # The work changes only where M passes one of the samples' times: find the last such step.
    steps = np.unique(cost_us[(cost_us > least_us) & np.isfinite(cost_us)])
    steps = np.concatenate([[least_us], steps])
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if least_mean_us(float(steps[middle])) < steps[middle + 1]:
            high = middle
        else:
            low = middle + 1
    return max(float(steps[low]), least_mean_us(float(steps[low])))


def _total(values: FloatArray) -> float:
    """The sum, added up from the first to the last on every machine."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
