"""A lower bound on the time of any plan, to report how far a plan is from the best possible.

A sample of length L at degree d keeps each of its node's d ranks busy for f(L, d) in forward and
b(L, d) in backward, dense work included, without the latency of nodes: how many nodes are active is
the plan's choice, so that time is no bound. Where nodes share experts with an expert-parallel group
of E ranks, f and b leave the experts out, and each of the E ranks gets an E-th part of the experts'
work e_f and e_b instead; elsewhere e_f = e_b = 0. With F and B the slowest forward and backward, of
all micro-batches together, no rank holds more than F of forward and B of backward time, and the
step lasts M = F + B besides the biases. Two bounds on M follow; the larger one is taken.

Work: all ranks together do all work, and a sample's own rank has time for it. M is at least the
least number with

    sum over j of  min over admissible d of  d (f + b) + e_f + e_b  <=  P M

where d is admissible if f + b + (e_f + e_b) / E <= M and ceil(L_j / d) <= token budget.

Mixture: attention, most of a long sample, takes longer in backward, compared with forward, than
other work does. A rank that holds such a sample is busy for all of B while it still has time left
in forward, and whatever it did then would take backward time too. For any k > 0 let

    f' = min(f, b / k)    e' = min(e_f, e_b / k)    z = b / k - f' + (e_b / k - e') / E  >=  0

What a rank holds, its samples' f' and its parts of e', adds up to its backward time over k less all
that is lacking, so at most to B / k less the z of its samples. Of F this leaves at least
max(0, F - B / k + sum of z), which is no less than the sum over its samples of max(0, C + z) for
C = min(0, F - B / k). Added up over all ranks,

    sum over j of  min over admissible d of  d f' + e' + d max(0, C + z)            <=  P F
    sum over j of  min over admissible d of  d f' + e' + d max(0, C + z) + d b + e_b  <=  P M

Both stay true with a bound on F in its place, and B = M - F: C only becomes less. F is at least the
mean forward work, and then at least what the first line says; the left side of the second falls as
M grows, so a number for which it is too much is below M. Here k is the least ratio of backward to
forward time of any leaf or expert.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_nsp.cost.score import SampleTimes
from megatron_nsp.plan.arrays import BoolArray, FloatArray

_STEPS, _NUM_RAISES = np.arange(16) / 16, 3
"""Where the interval of the second bound is looked at; times that the bound on F is raised."""

_LEAST_LACK = 0.01
"""Samples whose z at a leaf is less than this share of the first bound count as short."""


def lower_bound_us(times: SampleTimes, token_budget: int | None = None) -> float:
    """The lower bound, in microseconds, without the bias of the micro-batches.

    Args:
        times: the samples' times.
        token_budget: the most tokens a rank may hold in a micro-batch; None = no limit.
    """
    terms = _Terms.of(times, token_budget)
    bound_us, ratio = terms.work_bound_us(), terms.least_ratio()
    return bound_us if ratio is None else _Mixture.of(terms, ratio).bound_us(bound_us)


def work_bound_us(times: SampleTimes, token_budget: int | None = None) -> float:
    """The bound by work alone, which takes less time to find."""
    return _Terms.of(times, token_budget).work_bound_us()


def least_limit_us(longest_us: FloatArray, work_us: FloatArray, num_ranks: int) -> float:
    """The least M at which the cheapest work that M allows fits P ranks.

    Args:
        longest_us: `[K+1, n]` what M must be at least to allow a sample a degree; may be infinite.
        work_us: `[K+1, n]` work of all ranks together.
        num_ranks: ranks of the tree, P.
    """
    if longest_us.size == 0:
        return 0.0
    cheapest_us = np.where(np.isfinite(longest_us), work_us, np.inf).min(axis=0)
    # Neither this much work nor this long a sample can be avoided, whatever M is.
    least_us = max(_total(cheapest_us) / num_ranks, float(longest_us.min(axis=0).max()))
    is_settled = np.where(longest_us <= least_us, work_us, np.inf).min(axis=0) <= cheapest_us
    settled_us = _total(cheapest_us[is_settled])
    longest_us, work_us = longest_us[:, ~is_settled], work_us[:, ~is_settled]

    def least_mean_us(limit_us: float) -> float:
        allowed_us = np.where(longest_us <= limit_us, work_us, np.inf).min(axis=0)
        return (settled_us + _total(allowed_us)) / num_ranks

    # The work changes only where M passes one of the samples' times: find the last such step.
    steps = np.unique(longest_us[(longest_us > least_us) & np.isfinite(longest_us)])
    steps = np.concatenate([[least_us], steps])
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if least_mean_us(float(steps[middle])) < steps[middle + 1]:
            high = middle
        else:
            low = middle + 1
    return max(float(steps[low]), least_mean_us(float(steps[low])))


@dataclass(frozen=True, eq=False)
class _Terms:
    """Times of n samples; rows of samples, not of degrees, are the fastest to reduce.

    Attributes:
        degrees: `[K+1, 1]` the degrees.
        num_ranks: ranks of the tree, P.
        expert_degree: ranks of an expert-parallel group, E.
        own_us: `[2, K+1, n]` f and b.
        expert_us: `[2, K+1, n]` e_f and e_b, or one 0 for each pass.
        longest_us: `[K+1, n]` what a rank of a sample's node must have time for.
    """

    degrees: npt.NDArray[np.int64]
    num_ranks: int
    expert_degree: int
    own_us: FloatArray
    expert_us: FloatArray
    longest_us: FloatArray

    @classmethod
    def of(cls, times: SampleTimes, token_budget: int | None) -> "_Terms":
        """The terms of samples."""
        degrees, group = np.array(times.tree.degrees)[:, None], times.expert_degree
        own_us = np.array([times.fwd_us.T, times.bwd_us.T])
        expert_us, longest_us = np.zeros((2, 1, 1)), own_us[0] + own_us[1]
        if times.expert_us is not None:
            expert_us = times.expert_us.T[:, None] * times.shares_experts[:, None]
            own_us = own_us - expert_us / degrees
            longest_us = (own_us + expert_us / group).sum(axis=0)
        if token_budget is not None:
            longest_us = np.where(times.lengths > token_budget * degrees, np.inf, longest_us)
        return cls(degrees, times.tree.num_ranks, group, own_us, expert_us, longest_us)

    @cached_property
    def work_us(self) -> FloatArray:
        """`[2, K+1, n]` work of all ranks in both passes."""
        work_us: FloatArray = self.own_us * self.degrees + self.expert_us
        return work_us

    def work_bound_us(self) -> float:
        """The bound by work."""
        return least_limit_us(self.longest_us, self.work_us[0] + self.work_us[1], self.num_ranks)

    def least_ratio(self) -> float | None:
        """The least k: of the leaves and experts that take time in both passes, if any do."""
        fwd_us, bwd_us = np.concatenate([self.own_us[:, 0], self.expert_us[:, 0]], axis=1)
        takes_time = (fwd_us > 0) & (bwd_us > 0)
        return float((bwd_us[takes_time] / fwd_us[takes_time]).min()) if takes_time.any() else None


@dataclass(frozen=True, eq=False)
class _Mixture:
    """The bound by mixture.

    Attributes:
        ratio: k.
        degrees: `[K+1, 1]` the degrees.
        num_ranks: ranks of the tree, P.
        longest_us: `[K+1, n]` what a rank of a sample's node must have time for.
        lack_us: `[K+1, n]` z.
        sums_us: `[3, K+1, n]` d f + e_f; d f' + e'; d f' + e' + d b + e_b.
        settled_us: `[3]` the same added up over samples left out.
    """

    ratio: float
    degrees: npt.NDArray[np.int64]
    num_ranks: int
    longest_us: FloatArray
    lack_us: FloatArray
    sums_us: FloatArray
    settled_us: FloatArray

    @classmethod
    def of(cls, terms: _Terms, ratio: float) -> "_Mixture":
        """The bound's terms."""
        limit_us, expert_limit_us = terms.own_us[1] / ratio, terms.expert_us[1] / ratio
        kept_us = np.minimum(terms.own_us[0], limit_us)
        expert_kept_us = np.minimum(terms.expert_us[0], expert_limit_us)
        lack_us = limit_us - kept_us + (expert_limit_us - expert_kept_us) / terms.expert_degree
        all_kept_us = kept_us * terms.degrees + expert_kept_us
        sums_us = np.array([terms.work_us[0], all_kept_us, all_kept_us + terms.work_us[1]])
        return cls(
            ratio, terms.degrees, terms.num_ranks, terms.longest_us, lack_us, sums_us, np.zeros(3)
        )

    def bound_us(self, least_us: float) -> float:
        """The bound, or a known bound `least_us` if that is larger."""
        part = self._settled(least_us)
        high_us = float(part.least_mean_us(np.array([least_us]))[0])
        limits_us = least_us + max(high_us - least_us, 0.0) * _STEPS
        num_below = int((part.least_mean_us(limits_us) > limits_us).sum())
        return float(limits_us[max(num_below - 1, 0)])

    def least_mean_us(self, limits_us: FloatArray) -> FloatArray:
        """`[m]` what M is at least if it is at most each of the limits `[m]`."""
        is_allowed = self.longest_us <= limits_us[:, None, None]
        free_us = np.zeros((1, 1, 1))
        fwd_us = self._mean_us(0, is_allowed, free_us)
        for _ in range(_NUM_RAISES):
            offset_us = np.minimum(0.0, fwd_us - (limits_us - fwd_us) / self.ratio)
            free_us = np.maximum(0.0, offset_us[:, None, None] + self.lack_us) * self.degrees
            fwd_us = np.maximum(fwd_us, self._mean_us(1, is_allowed, free_us))
        return self._mean_us(2, is_allowed, free_us)

    def _mean_us(self, which: int, is_allowed: BoolArray, free_us: FloatArray) -> FloatArray:
        least_us = np.where(is_allowed, self.sums_us[which] + free_us, np.inf).min(axis=1)
        totals_us = np.cumsum(least_us, axis=1)[:, -1] if least_us.shape[1] else np.zeros(1)
        mean_us: FloatArray = (self.settled_us[which] + totals_us) / self.num_ranks
        return mean_us

    def _settled(self, limit_us: float) -> "_Mixture":
        """The same for limits no lower, with the short samples added up once and for all.

        Their leaf is the cheapest degree whatever M is; what little they lack is not counted.
        """
        is_open = (self.longest_us[0] > limit_us) | (self.lack_us[0] > _LEAST_LACK * limit_us)
        is_open |= (self.sums_us[:, 0] > self.sums_us.min(axis=1)).any(axis=0)
        return replace(
            self,
            longest_us=self.longest_us[:, is_open],
            lack_us=self.lack_us[:, is_open],
            sums_us=self.sums_us[:, :, is_open],
            settled_us=np.array([_total(each_us[0, ~is_open]) for each_us in self.sums_us]),
        )


def _total(values: FloatArray) -> float:
    """The sum, added up from the first to the last on every machine."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
