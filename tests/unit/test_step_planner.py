"""Pure tests of planning ahead: order, carrying, digests."""

import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.cost.score import PlanScore
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.order import NodeOrders
from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import SavedSamples
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.steps.sampler import Batch, BatchSampler, always
from megatron_nsp.steps.step_planner import PlannedStep, StepPlanner, plan_carried_first

TREE = SPTree(4, (1, 2, 4))
COST = CostModel(load_profile("h100-ib"), ModelShape.from_hidden(8, 512, 8, 8, 64), TREE)
LENGTHS = np.array(random.Random(0).choices(range(1, 101), k=200))


def plan_lengths(lengths: IntArray, budget: int | None = None) -> tuple[Plan, PlanScore]:
    result = plan_batch(lengths, TREE, COST, token_budget=budget)
    return result.plan, result.score


def planner(budget: int | None, plan_ahead: int = 0, first_step: int = 0) -> StepPlanner:
    """A run of 300-token steps; a budget of 60 holds only 240."""

    def plan(batch: Batch) -> tuple[Plan, PlanScore]:
        return plan_carried_first(batch, lambda lengths: plan_lengths(lengths, budget))

    return StepPlanner(
        BatchSampler(LENGTHS, always(300), 100, seed=1),
        plan,
        plan_ahead,
        None if budget is None else lambda batch: plan(batch)[0].carried,
        first_step,
    )


def steps(budget: int | None, count: int, **how: int) -> list[PlannedStep]:
    """The first steps of a run."""
    source = planner(budget, **how)
    found = [source.next_step() for _ in range(count)]
    source.close()
    return found


def test_a_carried_sample_waits_one_step_at_most() -> None:
    waited = 0
    for before, after in zip(steps(60, 60), steps(60, 60)[1:], strict=False):
        carried = before.batch.documents[before.plan.carried]
        assert after.batch.num_carried == len(carried)
        assert after.batch.documents[: len(carried)].tolist() == carried.tolist()
        assert (after.plan.carried >= len(carried)).all()
        waited += len(carried)
    assert waited > 20


def test_every_document_runs_once_an_epoch_although_some_are_carried() -> None:
    ran: list[int] = []
    for step in steps(60, 80):
        is_run = step.plan.micro_batch >= 0
        ran += step.batch.documents[is_run].tolist()
        if step.batch.epoch > 0:
            break
    counts = np.bincount(ran, minlength=200)
    assert counts.max() <= 2 and (counts == 0).sum() <= len(step.plan.carried)


@pytest.mark.parametrize("budget", [None, 60])
def test_planning_ahead_and_skipping_change_nothing(budget: int | None) -> None:
    plain = [step.digest for step in steps(budget, 12)]
    assert [step.digest for step in steps(budget, 12, plan_ahead=3)] == plain
    assert [step.digest for step in steps(budget, 7, first_step=5)] == plain[5:]
    assert len(set(plain)) == 12


def test_k3_a_run_resumed_at_the_end_of_an_epoch_has_all_of_the_next() -> None:
    """64 documents of 64 tokens, 16 a step: the first epoch ends with step 4."""

    for first_step in (0, 4, 8):
        sampler = BatchSampler(np.full(64, 64), always(1024), 64, seed=1)
        resumed = StepPlanner(sampler, lambda b: plan_lengths(b.lengths), 0, first_step=first_step)
        epoch = [resumed.next_step().batch.documents for _ in range(4)]
        resumed.close()
        assert sorted(np.concatenate(epoch).tolist()) == list(range(64))


class WatchedPlanning:
    """Plans 300-token steps and notes the thread; steps after the first wait for the caller."""

    def __init__(self, plan_ahead: int) -> None:
        self.caller_is_busy, self.third_is_planned = threading.Event(), threading.Event()
        self.threads: list[int] = []
        self.source = StepPlanner(
            BatchSampler(LENGTHS, always(300), 100, seed=1), self.plan, plan_ahead
        )

    def plan(self, batch: Batch) -> tuple[Plan, PlanScore]:
        if self.threads:
            assert self.caller_is_busy.wait(timeout=60), "the caller was kept for a later step"
        self.threads.append(threading.get_ident())
        if len(self.threads) == 3:
            self.third_is_planned.set()
        result = plan_batch(batch.lengths, TREE, COST)
        return result.plan, result.score


def test_the_next_steps_are_planned_while_the_caller_is_busy() -> None:
    watched = WatchedPlanning(plan_ahead=2)
    assert watched.source.next_step().number == 0
    watched.caller_is_busy.set()
    assert watched.third_is_planned.wait(timeout=60)
    watched.source.close()
    assert len(watched.threads) == 3 and len(set(watched.threads)) == 1
    assert threading.get_ident() not in watched.threads


def test_without_planning_ahead_the_caller_plans_the_step_it_asks_for() -> None:
    watched = WatchedPlanning(plan_ahead=0)
    watched.source.next_step()
    assert watched.threads == [threading.get_ident()]


def test_the_digest_sees_documents_of_equal_length() -> None:
    (step,) = steps(None, 1)
    batch = Batch(step.batch.documents[::-1].copy(), step.batch.lengths)
    assert PlannedStep(0, batch, step.plan, step.score, 0.0).digest != step.digest


def test_h2_marks_are_made_with_the_plan_and_are_part_of_the_digest() -> None:
    def mark(plan: Plan) -> SavedSamples:
        return SavedSamples({(0, node): 1 for node in plan.active_nodes()})

    def plan_batch_(batch: Batch) -> tuple[Plan, PlanScore]:
        result = plan_batch(batch.lengths, TREE, COST)
        return result.plan, result.score

    found = []
    for mark_saved in (mark, mark, lambda plan: SavedSamples()):
        sampler = BatchSampler(LENGTHS, always(300), 100, seed=1)
        source = StepPlanner(sampler, plan_batch_, 2, mark_saved=mark_saved)
        found.append([source.next_step() for _ in range(3)])
        source.close()
    for one, other, bare in zip(*found, strict=True):
        assert one.saved == mark(one.plan) and one.digest == other.digest != bare.digest
        last = max(one.saved.num_saved)
        less = SavedSamples({**one.saved.num_saved, last: 0})
        assert replace(one, saved=less).digest != one.digest


def test_the_digest_sees_the_order_of_nodes() -> None:
    (step,) = steps(None, 1)
    others = [NodeOrders({(0, pass_, 0): (1, 0)}) for pass_ in Pass]
    digests = {replace(step, orders=orders).digest for orders in (step.orders, *others)}
    assert len(digests) == 3


@pytest.mark.parametrize("plan_ahead", [0, 2])
def test_orders_are_chosen_with_the_plan(plan_ahead: int) -> None:
    source = StepPlanner(
        BatchSampler(LENGTHS, always(300), 100, seed=1),
        lambda batch: plan_lengths(batch.lengths),
        plan_ahead,
        order_nodes=lambda plan: NodeOrders({(0, Pass.FWD, 0): (plan.num_samples, 0)}),
    )
    step = source.next_step()
    source.close()
    assert step.orders.of_rank(0, TREE, 3)[Pass.FWD] == (step.plan.num_samples, 0)


def test_counts() -> None:
    step = next(step for step in steps(60, 9) if len(step.plan.carried))
    is_run = step.plan.micro_batch >= 0
    assert step.num_samples == is_run.sum()
    assert step.num_tokens == step.batch.lengths[is_run].sum() <= 240
    assert step.num_targets == step.num_tokens - step.num_samples
