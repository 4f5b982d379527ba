"""Nodes that TE runs itself: TE's real module, ring and Ulysses on gloo, as one node on a path
with nodes of other kinds, against the definition.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401 - once, before ranks are forked
from torch import Tensor

from megatron_nsp.plan.backends import NATIVE, OURS
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.attention import NestedBatch, nested_attention
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionMask
from megatron_nsp.testing.oracle import AttentionInputs, attention_oracle
from megatron_nsp.testing.ranks import run_ranks
from megatron_nsp.testing.runtime import local_runtime
from tests.te.te_on_cpu import te_module_on_cpu

CPU, MASK = torch.device("cpu"), AttentionMask(0.25)
TREE = SPTree(4, (1, 2, 4))
SAMPLES = [(37, 4, 0), (1, 4, 0), (5, 4, 0), (9, 2, 0), (3, 2, 0), (11, 2, 1), (6, 1, 1), (2, 1, 3)]
"""Lengths with the degrees and places of their nodes: odd, of one token, below twice the degree."""

Case = tuple[Plan, int, int]
"""A plan, with the head dims of keys and of values."""


def plan_of(root: str, half: str) -> Plan:
    nodes = [TREE.node(degree, index) for _, degree, index in SAMPLES]
    kinds = {nodes[0]: root, nodes[3]: half}
    splits = {
        (0, node): Split(TREE.degree(node), kind)
        for node, kind in kinds.items()
        if kind != "ulysses"
    }
    return Plan.from_nodes(TREE, [length for length, *_ in SAMPLES], nodes, splits=splits)


def draw(case: Case) -> AttentionInputs:
    plan, head_dim, value_dim = case
    num_tokens = int(plan.lengths.sum())
    return AttentionInputs.draw(num_tokens, 8, 4, head_dim, torch.float32, 3, value_dim)


def on_rank(rank: int, cases: list[Case]) -> list[tuple[list[int], dict[str, Tensor]]]:
    groups, results = NestedGroups.create(TREE, [range(4)]), []
    with te_module_on_cpu():
        from transformer_engine.pytorch import DotProductAttention

        from megatron_nsp.runtime.kernels.te_cp import TeContextParallel

        native = TeContextParallel()
        runtime = local_runtime(groups, native=native)
        setter = DotProductAttention.set_context_parallel_group
        with mock.patch.object(
            DotProductAttention, "set_context_parallel_group", autospec=True, side_effect=setter
        ) as spy:
            for case in cases:
                batch = NestedBatch.build(case[0], rank)
                rows = batch.layout.token_numbers(case[0].lengths)
                q, k, v, dout = draw(case).rows(rows, batch.layout.num_filler_tokens)
                leaves = [x.requires_grad_() for x in (q, k, v)]
                out = nested_attention(q, k, v, batch, MASK, runtime)
                out.backward(dout)
                found: dict[str, Any] = {"out": out.detach()}
                found |= {n: x.grad for n, x in zip(("dq", "dk", "dv"), leaves, strict=True)}
                results.append((rows.tolist(), {n: x[: len(rows)] for n, x in found.items()}))
        assert spy.call_count == len(native.modules)
        for group, method, *_ in native.modules:
            module = native.modules[group, method, *_]
            assert (module.cp_group, module.cp_comm_type) == (group, method)
            assert module.cp_global_ranks == dist.get_process_group_ranks(group)
    return results


@pytest.mark.parametrize("outer", NATIVE)
def test_te_as_a_node_of_a_path_is_the_definition(outer: str) -> None:
    others = [kind for kind in ("ulysses", *OURS, *NATIVE) if kind != outer]
    plans = [plan_of(outer, outer), *(plan_of(outer, x) for x in others)]
    plans += [plan_of(x, outer) for x in others]
    cases = [*((plan, 16, 16) for plan in plans), (plan_of(outer, outer), 20, 12)]
    per_rank = run_ranks(4, on_rank, cases, timeout_s=120)
    for case, *ranks in zip(cases, *per_rank, strict=True):
        exact = attention_oracle(draw(case), case[0].lengths, MASK)
        for name, expected in exact.values.items():
            found = torch.full_like(expected, float("nan"))
            for rows, tensors in ranks:
                found[rows] = tensors[name].double()
            assert float((found - expected).abs().max()) <= 2e-6, (name, case[0].splits)
