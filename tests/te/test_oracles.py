"""TE's own Ulysses and ring, run on gloo, against ours and against the definition."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401 - once, before ranks are forked
from torch import Tensor

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import ULYSSES, Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.attention import NestedBatch, nested_attention
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionMask
from megatron_nsp.testing.oracle import AttentionInputs, attention_oracle
from megatron_nsp.testing.ranks import run_ranks
from megatron_nsp.testing.runtime import local_runtime
from tests.te.te_on_cpu import rows_of_rank, te_attention

CPU = torch.device("cpu")
LENGTHS = [64, 8, 120]  # multiples of 2 * 4: TE deals whole chunks


def draw(dtype: torch.dtype) -> AttentionInputs:
    return AttentionInputs.draw(sum(LENGTHS), 8, 4, 16, dtype, seed=3)


def whole(parts: list[list[Tensor]], rows: list[list[int]]) -> list[Tensor]:
    """Each rank's rows put where they are in the batch."""
    index = torch.tensor([row for rank_rows in rows for row in rank_rows])
    found = []
    for tensors in zip(*parts, strict=True):
        joined = torch.cat(tensors)
        placed = torch.empty_like(joined)
        placed[index] = joined
        found.append(placed)
    return found


def on_te(rank: int, method: str, dtype: torch.dtype, is_causal: bool) -> tuple:
    inputs, cp = draw(dtype), dist.get_world_size()
    bounds = [0, *np.cumsum(LENGTHS).tolist()]
    rows = rows_of_rank(bounds, cp, rank)
    q, k, v, dout = inputs.rows(np.array(rows), 0)
    return te_attention(method, q, k, v, dout, bounds, is_causal), rows


def on_ours(rank: int, split: Split, dtype: torch.dtype, is_causal: bool) -> tuple:
    inputs, cp = draw(dtype), dist.get_world_size()
    tree = SPTree(cp, (1, cp))
    root = tree.node(cp, 0)
    plan = Plan.from_nodes(tree, LENGTHS, [root] * len(LENGTHS), splits={(0, root): split})
    groups = NestedGroups.create(tree, [range(cp)])
    batch = NestedBatch.build(plan, rank)
    rows = batch.layout.token_numbers(plan.lengths)
    q, k, v, dout = inputs.rows(rows, batch.layout.num_filler_tokens)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    runtime = local_runtime(groups)
    mask = AttentionMask(q.shape[2] ** -0.5, is_causal)
    out = nested_attention(leaves[0], leaves[1], leaves[2], batch, mask, runtime)
    out.backward(dout)
    count = len(rows)
    return [x[:count] for x in (out.detach(), *(x.grad for x in leaves))], rows.tolist()


def together(function: object, cp: int, *args: object) -> list[Tensor]:
    parts, rows = zip(*run_ranks(cp, function, *args), strict=True)  # type: ignore[arg-type]
    return whole(list(parts), list(rows))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cp", [2, 4])
def test_our_ulysses_has_the_bits_of_te_a2a(cp: int, dtype: torch.dtype, is_causal: bool) -> None:
    theirs = together(on_te, cp, "a2a", dtype, is_causal)
    ours = together(on_ours, cp, ULYSSES, dtype, is_causal)
    for name, one, other in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert torch.equal(one, other), (name, float((one - other).abs().max()))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("cp", [2, 4])
def test_te_ring_ours_and_the_definition_agree(cp: int, is_causal: bool) -> None:
    theirs = together(on_te, cp, "p2p", torch.float32, is_causal)
    ours = together(on_ours, cp, Split(cp, "ring"), torch.float32, is_causal)
    inputs = draw(torch.float32)
    exact = attention_oracle(inputs, np.array(LENGTHS), AttentionMask(0.25, is_causal))
    for one, other, name in zip(ours, theirs, ("out", "dq", "dk", "dv"), strict=True):
        assert float((one - other).abs().max()) <= 2e-6, name
        assert float((other - exact.values[name]).abs().max()) <= 2e-6, name
