"""The line of a step, word for word, from numbers that can be checked by hand."""

import numpy as np

from megatron_nsp.cost.score import PlanScore
from megatron_nsp.mcore.step_log import ExposedStep, step_line
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.saving import SavedSamples
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.steps.sampler import Batch
from megatron_nsp.steps.step_planner import PlannedStep

TREE = SPTree(4, (1, 2, 4))


def score(fwd_us: list[float], bwd_us: list[float], latency_us: list[float]) -> PlanScore:
    return PlanScore(np.array([fwd_us]), np.array([bwd_us]), np.array([latency_us]), 500.0)


def test_a_step_with_everything() -> None:
    # 50 tokens run, 10 at degree 1, 40 at degree 4; 30 and 20 more are carried.
    nodes = [TREE.node(4, 0), TREE.node(1, 0), TREE.node(1, 2), TREE.node(1, 0), TREE.node(1, 0)]
    plan = Plan.from_nodes(TREE, [40, 7, 3, 30, 20], nodes, [0, 0, 0, CARRIED, CARRIED])
    batch = Batch(
        documents=np.arange(5),
        lengths=plan.lengths,
        over_long=np.array([11, 5, 8, 9]),
        over_long_tokens=7777,
        num_empty=2,
        epoch=1,
        num_drawn=140,
    )
    # The ranks are busy for 4000, 1000, 2000 and 1000 us: 4000 over the mean of 2000.
    # The step lasts 1100 forward, 2900 backward and the bias of 500 us.
    times = score([1000, 200, 500, 200], [2800, 600, 1300, 600], [100, 100, 100, 100])
    step = PlannedStep(41, batch, plan, times, plan_ms=12.34, waited_ms=0.56)
    assert step_line(step, ExposedStep(40, 7.89)) == (
        "nsp step 42 | samples: 3 | tokens: 50 | targets: 47 | epoch: 2, documents drawn: 140 | "
        "predicted: 4.5 ms | imbalance: 2.000 | tokens per degree: 1: 20%, 4: 80% | "
        "plan: 12.3 ms, waited 0.6 ms | "
        "left out: 4 over-long (7777 tokens: documents 11, 5, 8 and 1 more) | "
        "left out: 2 empty | carried to the next step: 2 | "
        "exposed in step 41: 7.9 ms"
    )


def test_what_is_saved_is_told_where_there_is_a_budget() -> None:
    nodes = [TREE.node(4, 0), TREE.node(4, 0), TREE.node(1, 0)]
    plan = Plan.from_nodes(TREE, [40, 8, 7], nodes)
    batch, times = Batch(np.arange(3), plan.lengths), score([0] * 4, [0] * 4, [0] * 4)
    for saved, told in (
        (SavedSamples({(0, nodes[0]): 1}, 12345), "saved: 40 tokens, at most 0.012 MB a rank"),
        (SavedSamples({(0, nodes[0]): 2, (0, nodes[2]): 1}, 10**9), "saved: 55 tokens, at most"),
        (SavedSamples(), "saved: 0 tokens, at most 0.000 MB a rank"),
    ):
        assert told in step_line(PlannedStep(0, batch, plan, times, 1.0, saved=saved))
    assert "saved" not in step_line(PlannedStep(0, batch, plan, times, 1.0))


def test_a_step_without_targets_or_work_is_even() -> None:
    plan = Plan.from_nodes(TREE, [1, 1], [TREE.node(2, 0), TREE.node(2, 1)])
    batch = Batch(np.arange(2), plan.lengths)
    assert step_line(PlannedStep(0, batch, plan, score([0] * 4, [0] * 4, [0] * 4), 1.0)) == (
        "nsp step 1 | samples: 2 | tokens: 2 | targets: 0 (no targets in this step) | "
        "epoch: 1, documents drawn: 0 | predicted: 0.5 ms | imbalance: 1.000 | "
        "tokens per degree: 2: 100% | "
        "plan: 1.0 ms, waited 0.0 ms"
    )


def test_a_step_whose_nodes_are_not_all_ulysses_says_how_many_are_what() -> None:
    nodes = [TREE.node(4, 0), TREE.node(2, 0), TREE.node(2, 1), TREE.node(1, 3)]
    splits = {(0, nodes[0]): Split(2), (0, nodes[1]): Split(2)}
    plan = Plan.from_nodes(TREE, [9, 9, 9, 9], nodes, splits=splits)
    step = PlannedStep(
        0, Batch(np.arange(4), plan.lengths), plan, score([0] * 4, [0] * 4, [0] * 4), 1
    )
    assert "| nodes: ulysses: 1, ring: 1, usp: 1" in step_line(step)
