"""Exchanges run beside compute: made-up slow ones that each wait for what must happen meanwhile."""

import threading
from collections import defaultdict
from collections.abc import Mapping

import pytest
import torch

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime import executor
from megatron_nsp.runtime.attention import NestedBatch, nested_attention
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionMask
from megatron_nsp.testing.runtime import local_runtime

TREE = SPTree(4, (1, 2, 4))
OUTER, INNER = TREE.node(4, 0), TREE.node(2, 0)
NAME_OF_STREAM = {8: "outer", 4: "inner"}  # by its tokens: tells the calls of the kernel apart

# While the exchange or compute on the left runs, the event on the right must happen.
MEANWHILE = {
    "outer compute": "inner prologue starts",
    "inner prologue": "outer compute ends",
    "outer epilogue": "inner compute starts",
}


class SlowNode:
    """Kernel and network of one rank in one pass; writes down what happens, and on which thread.

    Args:
        meanwhile: what each exchange or compute waits for before it ends.
    """

    name = "slow"

    def __init__(self, meanwhile: Mapping[str, str]) -> None:
        self.meanwhile = meanwhile
        self.clear()

    def clear(self) -> None:
        self.events: dict[str, threading.Event] = defaultdict(threading.Event)
        self.order: list[str] = []
        self.threads: set[int] = set()

    def run(self, what: str) -> None:
        self.order.append(what)
        self.events[f"{what} starts"].set()
        if what in self.meanwhile:
            awaited = self.meanwhile[what]
            assert self.events[awaited].wait(timeout=60), f"{awaited} only after {what}"
        self.events[f"{what} ends"].set()

    def exchange(self, exchange: Exchange) -> torch.Tensor:
        prologue = f"{exchange.group} prologue"
        self.threads.add(threading.get_ident())
        self.run(f"{exchange.group} epilogue" if prologue in self.order else prologue)
        return exchange.send.new_zeros(sum(exchange.recv_counts))

    def forward(self, q, k, v, call):
        self.run(f"{NAME_OF_STREAM[len(q)]} compute")
        return torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))

    def backward(self, dout, state, call):
        self.run(f"{NAME_OF_STREAM[len(dout)]} compute")
        q, k, v, *_ = state.tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def passes(overlap: bool, node: SlowNode, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What happened in a forward and a backward pass of rank 0, each in the order of starting."""
    monkeypatch.setattr(executor, "run_exchange", node.exchange)
    groups = NestedGroups(TREE, 0, 0, {OUTER: "outer", INNER: "inner"})  # type: ignore[dict-item]
    runtime = local_runtime(groups, node, overlap=overlap)
    plan = Plan.from_nodes(TREE, [8, 4], [OUTER, INNER])
    batch = NestedBatch.build(plan, rank=0, overlap=overlap)
    q = torch.ones(4, 4, 8, requires_grad=True)
    out = nested_attention(q, q, q, batch, AttentionMask(1.0), runtime)
    orders = [node.order]
    node.clear()
    out.sum().backward()
    return [*orders, node.order]


def test_exchanges_run_under_the_compute_of_the_neighbouring_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = SlowNode(MEANWHILE)
    for order in passes(True, node, monkeypatch):
        assert sorted(order) == sorted(
            f"{name} {phase}"
            for name in ("outer", "inner")
            for phase in ("prologue", "compute", "epilogue")
        )


def test_without_overlap_a_node_is_done_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = SlowNode({})
    for order in passes(False, node, monkeypatch):
        assert order == [
            *("outer prologue", "outer compute", "outer epilogue"),
            *("inner prologue", "inner compute", "inner epilogue"),
        ]
    assert node.threads == {threading.get_ident()}
