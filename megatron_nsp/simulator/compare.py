"""Policies side by side: every batch planned by each and simulated, against the best static degree.

The reference is static sequence parallelism with one degree for the whole run: the degree with the
least total time of those at which the longest allowed sample fits the token budget and every batch
can be planned. A policy that cannot plan some batch is not compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.plan.arrays import FloatArray, IntArray
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import mark_saved
from megatron_nsp.planner import NO_MORE, BatchPolicy, plan_batch
from megatron_nsp.simulator.step import Breakdown, StepSettings, simulate_plan

STATIC = "static-"


@dataclass(frozen=True)
class Setting:
    """What all batches and policies of a comparison share.

    Attributes:
        cost: the cost model.
        token_budget: the most tokens a rank may hold in a micro-batch; None = no limit.
        num_micro_batches: micro-batches of a step; None = as many as the budget needs.
        longest: the longest sample that a run may meet; static degrees must hold it.
        execution: how steps are executed, its marks left out.
        save_bytes: budget for attention outputs that are not recomputed.
        token_balance: a budget of this many times a rank's mean tokens, if that is less.
    """

    cost: CostModel
    token_budget: int | None
    num_micro_batches: int | None
    longest: int
    execution: StepSettings
    save_bytes: float = 0.0
    token_balance: float | None = None

    def can_hold(self, policy: str) -> bool:
        """Whether a static degree holds the longest sample; other policies are not asked."""
        if not policy.startswith(STATIC) or self.token_budget is None:
            return True
        return -(-self.longest // int(policy.removeprefix(STATIC))) <= self.token_budget


@dataclass(frozen=True, eq=False)
class Trial:
    """One batch under one policy.

    Attributes:
        batch: number of the batch.
        policy: the policy.
        plan: its plan; None if it could not plan the batch.
        breakdown: where the time goes; None with `plan`.
        problem: why there is no plan.
    """

    batch: int
    policy: str
    plan: Plan | None
    breakdown: Breakdown | None
    problem: str = ""


def planned(
    lengths: IntArray,
    policy: str,
    setting: Setting,
    cost: CostModel | None = None,
    more_policies: Mapping[str, BatchPolicy] = NO_MORE,
) -> Plan:
    """One policy's plan of a batch; with `cost` made by another cost model.

    Raises:
        ValueError: the policy refuses the batch.
    """
    cost = cost or setting.cost
    return plan_batch(
        lengths,
        cost.tree,
        cost,
        token_budget=setting.token_budget,
        token_balance=setting.token_balance,
        num_micro_batches=setting.num_micro_batches,
        policy=policy,
        compares_all=False,
        more_policies=more_policies,
    ).plan


def run_trial(number: int, lengths: IntArray, policy: str, setting: Setting) -> Trial:
    """Plans and simulates one batch; a policy that refuses is noted, not raised."""
    try:
        plan = planned(lengths, policy, setting)
    except ValueError as error:
        return Trial(number, policy, None, None, str(error))
    if len(plan.carried):
        return Trial(number, policy, None, None, f"{len(plan.carried)} samples find no place")
    return Trial(number, policy, plan, simulate_with_marks(plan, setting))


def simulate_with_marks(plan: Plan, setting: Setting) -> Breakdown:
    """Simulates a plan with as much saved as the budget holds.

    Marks save recomputation by tree level; static and disjoint plans get the same budget.
    """
    settings = setting.execution
    if setting.cost.recompute != "none" and setting.save_bytes > 0:
        saved = mark_saved(plan, setting.cost.shape.saved_sizes, setting.save_bytes)
        settings = replace(settings, saved=saved)
    return simulate_plan(plan, setting.cost, settings)


def run_trials(
    batches: Sequence[IntArray], policies: Sequence[str], setting: Setting
) -> Iterator[Trial]:
    """Every batch under every policy that can hold the longest sample."""
    for number, lengths in enumerate(batches):
        for policy in policies:
            if setting.can_hold(policy):
                yield run_trial(number, lengths, policy, setting)


@dataclass(frozen=True, eq=False)
class Row:
    """A policy over all batches.

    Attributes:
        policy: the policy.
        step_us: `[batches]` time of each step.
        speedup: `[batches]` time of the best static degree over it.
        shares: mean share of the step of each part.
    """

    policy: str
    step_us: FloatArray
    speedup: FloatArray
    shares: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Comparison:
    """All policies that could plan every batch, the fastest first.

    Attributes:
        reference: the best static degree's policy.
        rows: the policies.
        failed: why other policies are missing.
    """

    reference: str
    rows: tuple[Row, ...]
    failed: Mapping[str, str]


def compare(trials: Sequence[Trial], policies: Sequence[str], setting: Setting) -> Comparison:
    """Sums trials up.

    Raises:
        ValueError: no static degree can plan every batch, so that there is nothing to compare with.
    """
    failed = {
        policy: f"the longest sample of {setting.longest} tokens does not fit the token budget of "
        f"{setting.token_budget}"
        for policy in policies
        if not setting.can_hold(policy)
    }
    for trial in trials:
        if trial.plan is None and trial.policy not in failed:
            failed[trial.policy] = f"batch {trial.batch}: {trial.problem}"
    done: dict[str, list[Breakdown]] = {name: [] for name in policies if name not in failed}
    for trial in trials:
        if trial.policy in done and trial.breakdown is not None:
            done[trial.policy].append(trial.breakdown)
    times = {name: np.array([entry.step_us for entry in entries]) for name, entries in done.items()}
    static = [name for name in times if name.startswith(STATIC)]
    if not static:
        raise ValueError(
            "no static degree can plan every batch: "
            + "; ".join(f"{name}: {why}" for name, why in failed.items() if STATIC in name)
        )
    reference = min(static, key=lambda name: float(times[name].sum()))
    rows = [
        Row(name, times[name], _ratio(times[reference], times[name]), _mean_shares(entries))
        for name, entries in done.items()
    ]
    rows.sort(key=lambda row: float(row.step_us.sum()))
    return Comparison(reference, tuple(rows), failed)


def _ratio(one_us: FloatArray, other_us: FloatArray) -> FloatArray:
    """One over the other; 1 for steps without work."""
    ratio: FloatArray = np.divide(one_us, other_us, out=np.ones_like(one_us), where=other_us > 0)
    return ratio


def _mean_shares(entries: Sequence[Breakdown]) -> dict[str, float]:
    shares = [entry.shares() for entry in entries]
    return {part: float(np.mean([share[part] for share in shares])) for part in shares[0]}
