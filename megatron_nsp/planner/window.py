"""Planning a whole batch: the search, the policies it is compared with, and the report."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from megatron_nsp.plan import CARRIED, IntArray, Plan
from megatron_nsp.planner.bounds import lower_bound_us
from megatron_nsp.planner.cost import CostModel
from megatron_nsp.planner.passes import Assignment, Batch
from megatron_nsp.planner.policies import BatchPolicy, Rival, policies_of, portfolio_of
from megatron_nsp.planner.score import PlanScore
from megatron_nsp.tree import SPTree

NO_MORE: Mapping[str, BatchPolicy] = MappingProxyType({})


@dataclass(frozen=True)
class PlanReport:
    """What `plan_batch` found out on the way.

    Attributes:
        policy: the policy whose plan was taken.
        load_us: time of the step under the plan.
        load_no_latency_us: the same without node latency.
        bound_us: lower bound for the samples that run, without node latency.
        search_load_us: time of the step under the search's own plan; None if it was not asked for.
        policies: time of the step under each policy of the portfolio that places all samples.
        infeasible: policies of the portfolio that do not, that refuse the batch, or were skipped.
        num_passes: micro-batches with samples; the others are filler passes.
        plan_ms: wall time of the call.
    """

    policy: str
    load_us: float
    load_no_latency_us: float
    bound_us: float
    search_load_us: float | None
    policies: dict[str, float]
    infeasible: tuple[str, ...]
    num_passes: int
    plan_ms: float

    @property
    def gap(self) -> float:
        """Load over the lower bound; 1 for a step without work."""
        return self.load_us / self.bound_us if self.bound_us > 0 else 1.0

    @property
    def gap_no_latency(self) -> float:
        """The same with the node latency taken out of the load."""
        return self.load_no_latency_us / self.bound_us if self.bound_us > 0 else 1.0


@dataclass(frozen=True, eq=False)
class PlanResult:
    """A plan, its score and how it came about."""

    plan: Plan
    score: PlanScore
    report: PlanReport


def policy_names(
    tree: SPTree, more_policies: Mapping[str, BatchPolicy] = NO_MORE
) -> tuple[str, ...]:
    """The names that `plan_batch` takes."""
    return ("auto", *policies_of(tree), *more_policies)


def plan_batch(
    lengths: npt.ArrayLike,
    tree: SPTree,
    cost: CostModel,
    *,
    token_budget: int | None = None,
    token_balance: float | None = None,
    num_micro_batches: int | None = 1,
    policy: str = "auto",
    compares_all: bool = True,
    more_policies: Mapping[str, BatchPolicy] = NO_MORE,
) -> PlanResult:
    """Plans one batch.

    Args:
        lengths: `[n]` tokens of each sample.
        tree: the SP tree.
        cost: the cost model, of the same tree.
        token_budget: the most tokens a rank may hold in one micro-batch; None = no limit.
        token_balance: a budget of this many times a rank's mean tokens, if that is less.
        num_micro_batches: passes of the step; None = as many as needed.
        policy: 'auto' (best of search and portfolio), or a policy by name, 'search' among them.
        compares_all: work out all of the portfolio, also what a lower bound rules out, and the
            tightest lower bound.
        more_policies: further policies by name; not in the portfolio.

    Raises:
        ValueError: a policy that is unknown or refuses the batch, or a sample no plan can hold.
    """
    start_s = time.perf_counter()
    tokens = np.array(lengths, dtype=np.int64).reshape(-1)
    policies = {**more_policies, **policies_of(tree)}
    token_budget = balanced_budget(tokens, tree, token_balance, token_budget)
    _check(tokens, tree, cost, token_budget, num_micro_batches, policy, ("auto", *policies))
    order = np.argsort(-tokens, kind="stable")
    batch = Batch(cost.sample_times(tokens[order]), token_budget)
    others, chosen = (portfolio_of(tree), "search") if policy == "auto" else ({}, policy)
    best = policies[chosen](batch, num_micro_batches or max(len(tokens), 1))
    _check_progress(batch, best, chosen, policies[chosen], order)
    passes = num_micro_batches or max(best.num_passes, 1)
    score = best.score(batch.times, passes)
    search_load_us = score.load_us if chosen == "search" else None
    kept_batch = batch.take(best.placed)
    to_beat_us = float("inf") if compares_all else score.load_us - passes * cost.profile.bias_us
    rivals = _rivals(batch, best.placed, passes, others, to_beat_us)
    for other, (_, other_score) in rivals.items():
        if other_score.load_us < score.load_us:
            chosen, (best, score) = other, rivals[other]
    report = PlanReport(
        policy=chosen,
        load_us=score.load_us,
        load_no_latency_us=score.load_no_latency_us,
        bound_us=_bound_us(kept_batch, compares_all) + passes * cost.profile.bias_us,
        search_load_us=search_load_us,
        policies={other: other_score.load_us for other, (_, other_score) in rivals.items()},
        infeasible=tuple(other for other in others if other not in rivals),
        num_passes=best.num_passes,
        plan_ms=(time.perf_counter() - start_s) * 1e3,
    )
    return PlanResult(best.plan(batch, order, passes), score, report)


def balanced_budget(
    tokens: IntArray, tree: SPTree, token_balance: float | None, token_budget: int | None
) -> int | None:
    """The token budget of a ratio: what evens out tokens, but never less than a sample needs.

    Raises:
        ValueError: a ratio below 1.
    """
    if token_balance is None:
        return token_budget
    if not 1 <= token_balance < 1e6:
        raise ValueError(f"the token balance must be at least 1, got {token_balance}")
    even = -(-int(tokens.sum()) // tree.num_ranks)
    least = -(-int(tokens.max(initial=1)) // tree.max_degree)
    budget = max(int(token_balance * even), least, 1)
    return budget if token_budget is None else min(budget, token_budget)


def _bound_us(batch: Batch, is_tightest: bool) -> float:
    """The lower bound, without bias; the search's own where there is no time for the tightest."""
    return (
        lower_bound_us(batch.times, batch.token_budget) if is_tightest else batch.problem.bound_us
    )


def _rivals(
    batch: Batch,
    kept: IntArray,
    max_passes: int,
    others: Mapping[str, Rival],
    to_beat_us: float,
) -> dict[str, tuple[Assignment, PlanScore]]:
    """What those of the other policies that place all of the kept samples make of them, by name.

    A policy that refuses such samples is left out as well, and one that cannot beat `to_beat_us`.
    """
    kept_batch, rivals = batch.take(kept), {}
    for name, policy in others.items():
        if policy.bound_us(kept_batch) >= to_beat_us:
            continue
        try:
            assignment = policy(kept_batch, max_passes)
        except ValueError:
            continue
        if assignment.is_complete:
            assignment = assignment.among(kept, len(batch.lengths))
            rivals[name] = assignment, assignment.score(batch.times, max_passes)
    return rivals


def _check_progress(
    batch: Batch, assignment: Assignment, name: str, policy: BatchPolicy, order: IntArray
) -> None:
    """Refuses to carry a sample that the policy will have no place for in any step.

    Raises:
        ValueError: one line naming the sample, the policy and the budget.
    """
    for sample in np.flatnonzero(assignment.micro_batch == CARRIED)[:1]:
        alone = policy(batch.take(np.array([sample])), 1)
        if not alone.is_complete:
            raise ValueError(
                f"policy {name} never fits sample {order[sample]}, {batch.lengths[sample]} tokens, "
                f"into the token budget of {batch.token_budget}"
            )


def _check(
    tokens: IntArray,
    tree: SPTree,
    cost: CostModel,
    token_budget: int | None,
    num_micro_batches: int | None,
    policy: str,
    names: tuple[str, ...],
) -> None:
    """Refuses what cannot be planned.

    Raises:
        ValueError: one line naming the sample or setting and its numbers.
    """
    assert cost.tree == tree, f"{cost.tree=} {tree=}"
    if policy not in names:
        raise ValueError(f"no policy {policy}, only {', '.join(names)}")
    if num_micro_batches is not None and num_micro_batches < 1:
        raise ValueError(f"the number of micro-batches must be at least 1, got {num_micro_batches}")
    for sample in np.flatnonzero(tokens < 1)[:1].tolist():
        raise ValueError(f"sample {sample} has {tokens[sample]} tokens, at least 1 needed")
    if token_budget is None:
        return
    if token_budget < 1:
        raise ValueError(f"the token budget must be at least 1, got {token_budget}")
    for sample in np.flatnonzero(tokens > token_budget * tree.max_degree)[:1].tolist():
        least = -(-int(tokens[sample]) // tree.max_degree)
        raise ValueError(
            f"sample {sample} of {tokens[sample]} tokens needs {least} tokens a rank at the "
            f"largest degree {tree.max_degree}, over the token budget of {token_budget}"
        )
