"""Planning a whole batch: the search, the policies it is compared with, and the report."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from megatron_nsp.cost.bounds import lower_bound_us, work_bound_us
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.score import PlanScore, SampleTimes
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner.choose_splits import with_cheapest_splits
from megatron_nsp.planner.policies import BatchPolicy, Rival, policies_of, portfolio_of
from megatron_nsp.planner.search.micro_batches import Assignment, BatchProblem

NO_MORE: Mapping[str, BatchPolicy] = MappingProxyType({})

_BUDGETS_TRIED = 4
"""Times a batch is planned, with less and less of the token budget, to leave room for chunks."""

_AGAIN_ABOVE = 1.01
"""Load without latency, as a multiple of the bound, from which further times are searched."""


@dataclass(frozen=True)
class PlanReport:
    """What `plan_batch` found out on the way.

    Attributes:
        policy: the policy whose plan was taken.
        load_us: time of the step under the plan.
        load_no_latency_us: the same without node latency.
        bound_us: lower bound for the samples that run, without node latency; NaN unless asked for.
        search_load_us: time of the step under the search's own plan; None if it was not asked for.
        policies: time of the step under each policy of the portfolio that places all samples.
        infeasible: policies of the portfolio that do not, that refuse the batch, or were skipped.
        num_micro_batches_used: micro-batches with samples; the others are filler ones.
        plan_ms: wall time of the call.
    """

    policy: str
    load_us: float
    load_no_latency_us: float
    bound_us: float
    search_load_us: float | None
    policies: dict[str, float]
    infeasible: tuple[str, ...]
    num_micro_batches_used: int
    plan_ms: float

    @property
    def gap(self) -> float:
        """Load over the lower bound; 1 for a step without work."""
        return self.load_us / self.bound_us if self.bound_us else 1.0

    @property
    def gap_no_latency(self) -> float:
        """The same with the node latency taken out of the load."""
        return self.load_no_latency_us / self.bound_us if self.bound_us else 1.0


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
        num_micro_batches: micro-batches of the step; None = as many as needed.
        policy: 'auto' (best of search and portfolio), or a policy by name, 'search' among them.
        compares_all: work out all of the portfolio, also what a lower bound rules out, and the
            lower bound of the step.
        more_policies: further policies by name; not in the portfolio.

    Raises:
        ValueError: a policy that is unknown or refuses the batch, or a sample no plan can hold.
    """
    start_s = time.perf_counter()
    assert cost.tree == tree, f"{cost.tree=} {tree=}"
    tokens = np.array(lengths, dtype=np.int64).reshape(-1)
    asked = _Request(
        tokens=tokens,
        cost=cost,
        token_budget=balanced_budget(tokens, tree, token_balance, token_budget),
        num_micro_batches=num_micro_batches,
        policy=policy,
        compares_all=compares_all,
        more_policies=more_policies,
    )
    asked.check()
    order = asked.order
    outcome = _plan_within_budget(asked, cost.search_times(tokens[order]))
    best, plan = outcome.best, outcome.best.plan
    bound_us = float("nan")
    if compares_all:
        running = tokens[order][plan.micro_batch[order] != CARRIED]
        bound_us = lower_bound_us(cost.bound_times(running), asked.token_budget)
    report = PlanReport(
        policy=best.policy,
        load_us=best.score.load_us,
        load_no_latency_us=best.score.load_no_latency_us,
        bound_us=bound_us + plan.num_micro_batches * cost.profile.bias_us,
        search_load_us=outcome.search_load_us,
        policies={rival.policy: rival.score.load_us for rival in outcome.rivals},
        infeasible=outcome.infeasible,
        num_micro_batches_used=best.num_micro_batches_used,
        plan_ms=(time.perf_counter() - start_s) * 1e3,
    )
    return PlanResult(plan, best.score, report)


@dataclass(frozen=True, eq=False)
class _Request:
    """What is asked of `plan_batch`; the attributes are its arguments, the budget worked out."""

    tokens: IntArray
    cost: CostModel
    token_budget: int | None
    num_micro_batches: int | None
    policy: str
    compares_all: bool
    more_policies: Mapping[str, BatchPolicy]

    @cached_property
    def order(self) -> IntArray:
        """The samples, longest first."""
        return np.argsort(-self.tokens, kind="stable")

    def check(self) -> None:
        """Refuses what cannot be planned.

        Raises:
            ValueError: one line naming the sample or setting and its numbers.
        """
        tokens, tree, budget = self.tokens, self.cost.tree, self.token_budget
        names = policy_names(tree, self.more_policies)
        if self.policy not in names:
            raise ValueError(f"no policy {self.policy}, only {', '.join(names)}")
        if self.num_micro_batches is not None and self.num_micro_batches < 1:
            raise ValueError(
                f"the number of micro-batches must be at least 1, got {self.num_micro_batches}"
            )
        for sample in np.flatnonzero(tokens < 1)[:1].tolist():
            raise ValueError(f"sample {sample} has {tokens[sample]} tokens, at least 1 needed")
        if budget is None:
            return
        if budget < 1:
            raise ValueError(f"the token budget must be at least 1, got {budget}")
        for sample in np.flatnonzero(tokens > budget * tree.max_degree)[:1].tolist():
            least = -(-int(tokens[sample]) // tree.max_degree)
            raise ValueError(
                f"sample {sample} of {tokens[sample]} tokens needs {least} tokens a rank at the "
                f"largest degree {tree.max_degree}, over the token budget of {budget}"
            )

    def finished(
        self, policy: str, assignment: Assignment, times: SampleTimes, num_micro_batches: int
    ) -> "_Finished":
        """A placement as a plan on the whole tree, with its nodes split."""
        cost = self.cost
        plain = assignment.plan(BatchProblem(times, None), self.order, num_micro_batches)
        depths = [cost.tree.depth_of(degree) for degree in reversed(times.tree.degrees)]
        plain = replace(
            plain,
            tree=cost.tree,
            depth=np.array(depths)[plain.depth],
            token_budget=self.token_budget,
        )
        plans = [plain] if cost.is_ulysses else [with_cheapest_splits(plain, cost)]
        degrees = np.array(cost.tree.degrees)[cost.tree.column_of_depth(plain.depth)]
        if plans[0].splits and set(cost.ulysses_degrees).issuperset(degrees.tolist()):
            plans.insert(0, plain)  # what is cheaper for a node may still slow down a micro-batch
        done = [
            _Finished(policy, each, cost.score(each), assignment.num_micro_batches_used)
            for each in plans
        ]
        return min(done, key=lambda one: one.rank)


@dataclass(frozen=True, eq=False)
class _Finished:
    """A policy's plan and its score."""

    policy: str
    plan: Plan
    score: PlanScore
    num_micro_batches_used: int

    @cached_property
    def rank(self) -> tuple[int, int, float]:
        """Tokens over the budget, tokens carried, time of the step: less is better."""
        carried = int(self.plan.lengths[self.plan.carried].sum())
        return self.plan.over_budget_tokens(), carried, self.score.load_us

    @property
    def work_us(self) -> float:
        """Time of the step without biases and node latency."""
        bias_us = self.plan.num_micro_batches * self.score.bias_us
        return self.score.load_no_latency_us - bias_us


@dataclass(frozen=True, eq=False)
class _Outcome:
    """The best plan that some times lead to; the other attributes are those of `PlanReport`."""

    best: _Finished
    search_load_us: float | None
    rivals: list[_Finished]
    infeasible: tuple[str, ...]

    def is_near(self, bound_us: float) -> bool:
        """Whether a plan for all samples could hardly be faster than the one there is."""
        over, carried, _ = self.best.rank
        return not over and not carried and self.best.work_us <= _AGAIN_ABOVE * bound_us


def _plan_within_budget(asked: _Request, searches: list[SampleTimes]) -> _Outcome:
    """Plans with ever smaller budgets until the plan, with its nodes split, holds the real one.

    Raises:
        ValueError: no policy places the samples, or no budget leaves room enough for chunks.
    """
    limit, over = asked.token_budget, 0
    longest = int(searches[0].lengths.max(initial=0))
    for _ in range(_BUDGETS_TRIED):
        if limit is not None:
            limit -= over
            if longest > limit * asked.cost.tree.max_degree:
                break
        outcome = _best_outcome(asked, searches, limit)
        over = outcome.best.plan.over_budget_tokens()
        if not over:
            return outcome
    raise ValueError(
        f"the chunks of ring members put {over} tokens more on a rank than the token budget of "
        f"{asked.token_budget}; the longest sample has {longest} tokens"
    )


def _best_outcome(asked: _Request, searches: list[SampleTimes], limit: int | None) -> _Outcome:
    """The better plan of those that the times lead to, the first of equal ones.

    Times that promise little over a plan there is are not searched.
    """
    outcomes: list[_Outcome] = []
    problem: ValueError | None = None
    for times in searches:
        # Other policies mean the degrees of the whole tree: its root, its two ends, ...
        is_other = times.tree != asked.cost.tree
        if is_other and asked.policy not in ("auto", "search"):
            continue
        if (
            is_other
            and limit is not None
            and times.lengths.max(initial=0) > (limit * times.tree.max_degree)
        ):
            continue
        if any(outcome.is_near(work_bound_us(times, limit)) for outcome in outcomes):
            continue
        try:
            outcomes.append(_outcome(asked, times, limit))
        except ValueError as error:
            problem = error
    if not outcomes:
        assert problem is not None
        raise problem
    return min(outcomes, key=lambda outcome: outcome.best.rank)


def _outcome(asked: _Request, times: SampleTimes, limit: int | None) -> _Outcome:
    """What the policies make of a batch with these times."""
    batch, tree = BatchProblem(times, limit), times.tree
    policies = {**asked.more_policies, **policies_of(tree)}
    is_auto = asked.policy == "auto"
    others, chosen = (portfolio_of(tree), "search") if is_auto else ({}, asked.policy)
    placed = policies[chosen](batch, asked.num_micro_batches or max(len(times.lengths), 1))
    _check_progress(batch, placed, chosen, policies[chosen], asked.order)
    num_micro_batches = asked.num_micro_batches or max(placed.num_micro_batches_used, 1)
    own = asked.finished(chosen, placed, times, num_micro_batches)
    to_beat_us = float("inf")
    if not asked.compares_all:
        to_beat_us = own.score.load_us - num_micro_batches * asked.cost.profile.bias_us
    rivals = [
        asked.finished(name, assignment, times, num_micro_batches)
        for name, assignment in _rivals(
            batch, placed.placed, num_micro_batches, others, to_beat_us
        ).items()
    ]
    names = {rival.policy for rival in rivals}
    return _Outcome(
        best=min((own, *rivals), key=lambda one: one.rank),
        search_load_us=own.score.load_us if chosen == "search" else None,
        rivals=rivals,
        infeasible=tuple(name for name in others if name not in names),
    )


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


def _rivals(
    batch: BatchProblem,
    placed: IntArray,
    max_micro_batches: int,
    others: Mapping[str, Rival],
    to_beat_us: float,
) -> dict[str, Assignment]:
    """What those of the other policies that place all of the placed samples make of them, by name.

    A policy that refuses such samples is left out as well, and one that cannot beat `to_beat_us`.
    """
    placed_batch, rivals = batch.take(placed), {}
    for name, policy in others.items():
        if policy.bound_us(placed_batch) >= to_beat_us:
            continue
        try:
            assignment = policy(placed_batch, max_micro_batches)
        except ValueError:
            continue
        if assignment.is_complete:
            rivals[name] = assignment.among(placed, len(batch.lengths))
    return rivals


def _check_progress(
    batch: BatchProblem, assignment: Assignment, name: str, policy: BatchPolicy, order: IntArray
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
