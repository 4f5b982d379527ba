"""Recomputation of attention on gloo ranks: order under delays, and a store that never lingers.

Case H1 of docs/cases.md.
"""

import random
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.attention import AttentionRuntime, Layer, NestedBatch, nested_attention
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionMask
from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel
from megatron_nsp.testing.logging_group import CollectiveLog, Record, logged_new_group
from megatron_nsp.testing.ranks import run_ranks
from megatron_nsp.testing.runtime import local_runtime

TREE = SPTree(4, (1, 2, 4))
NODES = [TREE.node(4, 0), TREE.node(4, 0), TREE.node(2, 0), TREE.node(2, 1), TREE.node(1, 1)]
PLAN = Plan.from_nodes(TREE, [41, 30, 21, 20, 9], NODES)
ROOT, HALVES, LEAF = NODES[0], NODES[2:4], NODES[4]
MARKS = {
    "nothing": NOTHING_SAVED,
    "part of the root": SavedSamples({(0, ROOT): 1}),
    "the root": SavedSamples({(0, ROOT): 2}),
    "root and halves": SavedSamples({(0, ROOT): 2, **{(0, node): 1 for node in HALVES}}),
    "everything": SavedSamples({(0, ROOT): 2, **{(0, node): 1 for node in [*HALVES, LEAF]}}),
}
REDONE_WIDE_NODES = {
    "nothing": 2,
    "part of the root": 2,
    "the root": 1,
    "root and halves": 0,
    "everything": 0,
}
ROUNDS = 50


class SleepyKernel(CpuFlashKernel):
    """Waits up to 50 ms before it computes."""

    def __init__(self, rank: int) -> None:
        self.rng = random.Random(rank)

    def forward(self, *args: Any) -> Any:
        time.sleep(self.rng.random() * 0.05)
        return super().forward(*args)

    def backward(self, *args: Any) -> Any:
        time.sleep(self.rng.random() * 0.05)
        return super().backward(*args)


def inputs(rank: int, batch: NestedBatch) -> list[Tensor]:
    torch.manual_seed(rank)
    rows = batch.layout.buffer_tokens
    return [torch.randn(rows, 4, 8, requires_grad=True) for _ in range(3)]


def attend(qkv: list[Tensor], batch: NestedBatch, runtime: AttentionRuntime, layer: int) -> Tensor:
    """One recomputed layer."""

    def run(*leaves: Tensor) -> Tensor:
        mask, which = AttentionMask(0.3), Layer(layer, is_training=True)
        return nested_attention(*leaves, batch, mask, runtime, layer=which)

    return checkpoint(run, *qkv, use_reentrant=True)


def _sleepy_rounds(rank: int) -> list[tuple[Record, ...]]:
    log = CollectiveLog()
    groups = NestedGroups.create(TREE, [range(4)], logged_new_group(log))
    runtime = local_runtime(groups, SleepyKernel(rank))
    rounds, names = [], [*MARKS]
    for number in range(ROUNDS):
        batch = NestedBatch.build(PLAN, rank, saved_samples=MARKS[names[number % len(names)]])
        log.clear()
        attend(inputs(rank, batch), batch, runtime, 1).sum().backward()
        rounds.append(tuple(log.records))
    return rounds


def test_h1_ranks_agree_on_every_exchange_however_late_each_one_is() -> None:
    ranks = run_ranks(4, _sleepy_rounds, timeout_s=120)
    names = [*MARKS]
    for number in range(ROUNDS):
        # Two nodes of more than one rank on every path: each has an all-to-all in and one out, in
        # forward and in backward; what is recomputed has its own two once more.
        count = 4 * 2 + 2 * REDONE_WIDE_NODES[names[number % len(names)]]
        assert [len(rounds[number]) for rounds in ranks] == [count] * 4
        for one in range(4):
            for other in range(one):
                lists = [
                    [record for record in ranks[rank][number] if {one, other} <= {*record.ranks}]
                    for rank in (one, other)
                ]
                for mine, its in zip(*lists, strict=True):
                    assert mine.ranks == its.ranks
                    places = mine.ranks.index(one), mine.ranks.index(other)
                    assert mine.send_rows[places[1]] == its.recv_rows[places[0]]
                    assert its.send_rows[places[0]] == mine.recv_rows[places[1]]


def _broken_off_then_repeated(rank: int) -> bool:
    """A forward pass whose backward never comes, then the batch runs once more."""
    groups = NestedGroups.create(TREE, [range(4)])
    runtime = local_runtime(groups)
    batch = NestedBatch.build(PLAN, rank, saved_samples=MARKS["everything"])
    gradients = []
    for changed in (True, False, False):
        qkv = inputs(rank, batch)
        scale = 2.0 if changed else 1.0
        out = attend([x * scale for x in qkv], batch, runtime, 1)
        assert [*batch.saved_outputs] == [1] and len(batch.saved_outputs[1]) == len(
            batch.layout.slices
        )
        if changed:
            continue  # as if a later layer had raised
        out.sum().backward()
        assert not batch.saved_outputs
        gradients.append([x.grad for x in qkv])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_what_a_broken_off_pass_saved_is_replaced_by_the_next() -> None:
    assert run_ranks(4, _broken_off_then_repeated) == [True] * 4


def _evaluate(rank: int) -> bool:
    groups = NestedGroups.create(TREE, [range(4)])
    runtime = local_runtime(groups)
    batch = NestedBatch.build(PLAN, rank, saved_samples=MARKS["everything"])
    with torch.no_grad():
        for layer in (None, Layer(1, is_training=False)):
            nested_attention(*inputs(rank, batch), batch, AttentionMask(0.3), runtime, layer=layer)
    return not batch.saved_outputs


def test_evaluation_saves_nothing() -> None:
    assert run_ranks(4, _evaluate) == [True] * 4
