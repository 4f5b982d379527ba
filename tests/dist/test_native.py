"""Nodes that Transformer Engine runs itself, among nodes of all other kinds, with a stand-in for
TE that is bound to its recorded signatures.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_nsp.plan.backends import NATIVE, OURS
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import SavedSamples
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.attention import Layer, NestedBatch, nested_attention
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.executor import CommunicationQueue, Pending, build_queue
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionMask, choose_native
from megatron_nsp.testing.oracle import AttentionInputs, attention_oracle
from megatron_nsp.testing.ranks import run_ranks
from megatron_nsp.testing.runtime import local_runtime
from tests.dist.kernel_packages import installed
from tests.dist.package_calls import Package
from tests.dist.te_cp_package import te_cp

CPU = torch.device("cpu")
TREE = SPTree(4, (1, 2, 4))
HEADS = (8, 4, 20, 12)
"""Query and key/value heads, head dim and value dim: no multiples of 8."""


class WatchedQueue:
    """Counts what has been issued and not been waited for."""

    def __init__(self, inner: CommunicationQueue) -> None:
        self.inner, self.in_flight, self.num_issued = inner, 0, 0

    def issue(self, exchange: Exchange) -> "_Watched":
        if exchange.group is not None:
            self.in_flight += 1
            self.num_issued += 1
        return _Watched(self, self.inner.issue(exchange), exchange.group is not None)

    def check(self) -> None:
        assert self.in_flight == 0, f"{self.in_flight} exchanges while TE communicates"


class _Watched:
    def __init__(self, queue: WatchedQueue, pending: Pending, is_sent: bool) -> None:
        self.queue, self.pending, self.is_sent = queue, pending, is_sent

    def wait(self) -> Tensor:
        self.queue.in_flight -= self.is_sent
        self.is_sent = False
        return self.pending.wait()


@contextmanager
def stood_in(package: Package, queue: WatchedQueue) -> Iterator[Any]:
    """What runs native nodes, over the stand-in."""
    with (
        installed(te_cp(package, queue.check)),
        mock.patch.object(torch.cuda, "Stream", return_value="a stream"),
    ):
        from megatron_nsp.runtime.kernels.te_cp import TeContextParallel

        yield TeContextParallel()


def draw(plan: Plan, seed: int) -> AttentionInputs:
    heads, kv_heads, head_dim, value_dim = HEADS
    shape = int(plan.lengths.sum()), heads, kv_heads, head_dim
    return AttentionInputs.draw(*shape, torch.float64, seed, value_dim)


def attend(
    rank: int,
    plan: Plan,
    groups: NestedGroups,
    native: Any,
    queue: WatchedQueue,
    seed: int,
    overlap: bool,
    window_left: int | None = None,
) -> tuple[list[int], dict[str, Tensor]]:
    """The rank's rows of output and gradients, and which tokens they are."""
    batch = NestedBatch.build(plan, rank, overlap=overlap)
    rows = batch.layout.token_numbers(plan.lengths)
    q, k, v, dout = draw(plan, seed).rows(rows, batch.layout.num_filler_tokens)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runtime = local_runtime(groups, queue=queue, native=native)
    mask = AttentionMask(0.25, window_left=window_left)
    out = nested_attention(q, k, v, batch, mask, runtime)
    out.backward(dout)
    found = {"out": out.detach()}
    found |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True)}
    return rows.tolist(), {name: x[: len(rows)] for name, x in found.items()}


def errors(plan: Plan, ranks: list, seed: int, window_left: int | None = None) -> dict[str, float]:
    mask = AttentionMask(0.25, window_left=window_left)
    exact = attention_oracle(draw(plan, seed), plan.lengths, mask)
    found = {name: torch.full_like(x, float("nan")) for name, x in exact.values.items()}
    for rows, tensors in ranks:
        for name, value in tensors.items():
            found[name][rows] = value
    return exact.errors(found)


AWKWARD = [(37, 4, 0), (1, 4, 0), (5, 4, 0), (9, 2, 0), (3, 2, 0), (11, 2, 1), (6, 1, 1), (2, 1, 3)]
"""Lengths with the degrees and places of their nodes: odd, of one token, below twice the degree."""

KINDS = ("ulysses", *OURS, *NATIVE)


def awkward_plan(root: str, first_half: str, second_half: str) -> Plan:
    """The samples above on nodes of these kinds."""
    nodes = [TREE.node(degree, index) for _, degree, index in AWKWARD]
    kinds = {nodes[0]: root, nodes[3]: first_half, nodes[5]: second_half}
    splits = {
        (0, node): Split(TREE.degree(node), kind)
        for node, kind in kinds.items()
        if kind != "ulysses"
    }
    return Plan.from_nodes(TREE, [length for length, *_ in AWKWARD], nodes, splits=splits)


def on_rank(rank: int, cases: list[tuple[Plan, bool]]) -> list:
    groups, package = NestedGroups.create(TREE, [range(4)]), Package()
    results = []
    for seed, (plan, overlap) in enumerate(cases):
        queue = WatchedQueue(build_queue(CPU, overlap))
        with stood_in(package, queue) as native:
            results.append(attend(rank, plan, groups, native, queue, seed, overlap))
            assert queue.in_flight == 0
    return results


def test_native_nodes_among_all_others_equal_the_oracle() -> None:
    """Above and below nodes of every kind, in both orders of issue."""
    plans = [awkward_plan(root, half, "ulysses") for root, half in product(KINDS, KINDS)]
    plans += [awkward_plan("ring", "te-p2p", "te-a2a"), awkward_plan("te-a2a", "ring", "te-p2p")]
    cases = list(product(plans, (True, False)))
    results = run_ranks(4, on_rank, cases)
    for seed, ((plan, overlap), *ranks) in enumerate(zip(cases, *results, strict=True)):
        found = errors(plan, ranks, seed)
        assert max(found.values()) <= 1e-10, (plan.splits, overlap, found)


def on_rank_twice(rank: int, plan: Plan) -> dict[str, Any]:
    groups, package = NestedGroups.create(TREE, [range(4)]), Package()
    queue = WatchedQueue(build_queue(CPU, overlap=True))
    with stood_in(package, queue) as native:
        for seed in range(3):
            result = attend(rank, plan, groups, native, queue, seed, True)
        modules = dict(native.modules)
    used = {id(call["module"]): call["module"] for call in package.calls}
    assert {id(module) for module in modules.values()} == set(used)
    calls = [
        {
            "method": call["module"].method,
            "group": call["module"].group is groups.group(node),
            "rows": call["query_layer"].shape[0],
            "bounds": call["cu_seqlens_q"].tolist(),
            "longest": call["max_seqlen_q"],
            "bounds are one": call["cu_seqlens_q"] is package.calls[place]["cu_seqlens_kv"],
        }
        for place, call in enumerate(package.calls)
        for (_, node), split in plan.splits.items()
        if split.name == f"te-{call['module'].method}"
    ]
    return {"result": result, "modules": len(modules), "calls": calls, "sent": queue.num_issued}


def test_a_module_for_each_group_and_whole_samples_in_each_call() -> None:
    plan = awkward_plan("te-p2p", "te-a2a", "ulysses")
    ranks = run_ranks(4, on_rank_twice, plan)
    assert max(errors(plan, [rank["result"] for rank in ranks], 2).values()) <= 1e-10
    root = {
        "method": "p2p",
        "group": True,
        "rows": 10 + 2 + 2,
        "bounds": [0, 40, 48, 56],  # 37, 5 and 1 tokens, longest first
        "longest": 40,
        "bounds are one": True,
    }
    half = {**root, "method": "a2a", "rows": 6 + 2, "bounds": [0, 12, 16], "longest": 12}
    for rank, found in enumerate(ranks):
        is_first = rank < 2
        assert found["modules"] == 1 + is_first  # three calls, and no module made anew
        calls = sorted(found["calls"], key=lambda call: call["method"])
        assert calls == [half] * 3 * is_first + [root] * 3
        # Nothing goes through our queue but the Ulysses node of ranks 2 and 3.
        assert found["sent"] == (0 if is_first else 3 * 4)


def on_rank_windowed(rank: int, plan: Plan) -> tuple:
    groups = NestedGroups.create(TREE, [range(4)])
    queue = WatchedQueue(build_queue(CPU, overlap=True))
    with stood_in(Package(), queue) as native:
        return attend(rank, plan, groups, native, queue, 0, True, window_left=4)


def test_te_a2a_keeps_a_window() -> None:
    root = TREE.node(4, 0)
    plan = Plan.from_nodes(TREE, [37, 1, 5], [root] * 3, splits={(0, root): Split(4, "te-a2a")})
    ranks = run_ranks(4, on_rank_windowed, plan)
    assert max(errors(plan, ranks, 0, window_left=4).values()) <= 1e-10


def refusals(
    outer: str,
    num_kv_heads: int = 4,
    sinks: Tensor | None = None,
    saved: int = 0,
    native: Any = "loaded",
    **mask: Any,
) -> None:
    """A call on one rank that must fail before anything is sent."""
    root = TREE.node(4, 0)
    plan = Plan.from_nodes(TREE, [8], [root], splits={(0, root): Split(4, outer)})
    groups: Any = {root: object()}
    batch = NestedBatch.build(plan, 0, saved_samples=SavedSamples({(0, root): saved}))
    runtime = local_runtime(NestedGroups(TREE, 0, 0, groups), overlap=False, native=native)
    q, k, v = (
        torch.zeros(batch.layout.buffer_tokens, n, 8) for n in (8, num_kv_heads, num_kv_heads)
    )
    nested_attention(
        q, k, v, batch, AttentionMask(0.3, **mask), runtime, sinks, Layer(1, is_training=True)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer": "te-p2p", "native": None}, "te-p2p needs Transformer Engine, which this run"),
        ({"outer": "te-a2a", "num_kv_heads": 2}, "8 query and 2 key/value heads .* degree 4"),
        ({"outer": "te-p2p", "window_left": 3}, "te-p2p has no sliding window, got one of 3"),
        ({"outer": "te-a2a", "is_causal": False}, "te-a2a fills samples up.*got a full one"),
        ({"outer": "te-p2p", "sinks": torch.zeros(8)}, "te-p2p serves no attention sinks, got 8"),
        ({"outer": "te-p2p", "saved": 1}, "te-p2p gives no LSE, .* got 1 of a node of degree 4"),
    ],
)
def test_what_te_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refusals(**arguments)


def on_rank_in_flight(rank: int, plans: list[Plan]) -> dict[str, Any]:
    """Evaluation, two calls that are live at once, and a layer that is computed again."""
    tree, package = plans[0].tree, Package()
    groups = NestedGroups.create(tree, [range(2)])
    queue = WatchedQueue(build_queue(CPU, overlap=True))
    mask, found, has_graph = AttentionMask(0.25), {}, {}
    with stood_in(package, queue) as native:
        runtime = local_runtime(groups, queue=queue, native=native)
        calls = []
        for seed, plan in enumerate(plans):
            batch = NestedBatch.build(plan, rank)
            rows = batch.layout.token_numbers(plan.lengths)
            q, k, v, dout = draw(plan, seed).rows(rows, 0)
            leaves = [x.requires_grad_() for x in (q, k, v)]

            def layer(*x: Tensor, batch: NestedBatch = batch, layer: Layer | None = None) -> Tensor:
                return nested_attention(*x, batch, mask, runtime, layer=layer)  # type: ignore[misc]

            calls.append((rows, leaves, dout, layer))
        with torch.no_grad():
            calls[0][3](*calls[0][1])
        outs = [layer(*leaves) for _, leaves, _, layer in calls]
        for place, ((rows, leaves, dout, _), out) in enumerate(zip(calls, outs, strict=True)):
            out.backward(dout)
            grads = [x.grad.clone() for x in leaves]
            found[place] = rows.tolist(), dict(zip(("dq", "dk", "dv"), grads, strict=True))
        rows, leaves, dout, layer = calls[0]
        for x in leaves:
            x.grad = None
        again = partial(layer, layer=Layer(1, is_training=True))
        checkpoint(again, *leaves, use_reentrant=True).backward(dout)
        for name, x in zip(("dq", "dk", "dv"), leaves, strict=True):
            assert torch.equal(x.grad, found[0][1][name]), name
        has_graph = [call["query_layer"].requires_grad for call in package.calls]
    return {"found": found, "modules": len(native.modules), "has graph": has_graph}


def test_the_graph_of_a_call_lives_with_the_call() -> None:
    tree = SPTree(2, (1, 2))
    plans = [
        Plan.from_nodes(
            tree,
            lengths,
            [tree.node(2, 0)] * len(lengths),
            splits={(0, tree.node(2, 0)): Split(2, "te-p2p")},
        )
        for lengths in ([7, 12], [3, 30, 1])
    ]
    ranks = run_ranks(2, on_rank_in_flight, plans)
    for place, plan in enumerate(plans):
        exact = attention_oracle(draw(plan, place), plan.lengths, AttentionMask(0.25))
        for rank in ranks:
            rows, grads = rank["found"][place]
            for name, grad in grads.items():
                torch.testing.assert_close(grad, exact.values[name][rows], rtol=0, atol=1e-10)
    for rank in ranks:
        assert rank["modules"] == 1
        # Evaluation, two calls, then a layer's first pass and the pass that computes it again:
        # what needs no backward has no graph, and no backward attends again.
        assert rank["has graph"] == [False, True, True, False, True]


def test_a_backend_that_is_not_there_is_named() -> None:
    cuda = torch.device("cuda")
    with installed({}):
        assert choose_native("ring", cuda) is None
        with pytest.raises(ValueError, match=r"--nsp-backend te-a2a needs .*transformer-engine\)"):
            choose_native("te-a2a", cuda)
    with installed(te_cp(Package(), lambda: None)):
        assert type(choose_native("te-p2p", cuda)).__name__ == "TeContextParallel"
        with pytest.raises(
            ValueError, match=r"--nsp-backend te-p2p runs on cuda tensors, .* is cpu"
        ):
            choose_native("te-p2p", CPU)
