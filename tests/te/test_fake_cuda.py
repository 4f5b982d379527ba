"""Nested attention on fake CUDA tensors through TE's real Python, down to its extension.

Every argument check of TE runs. What its extension is called with is looked at; what it gives back
are tensors of the right shapes and no values.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.runtime import executor
from megatron_nsp.runtime.attention import NestedBatch, nested_attention
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import (
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
    kernel_class,
)
from megatron_nsp.testing.runtime import local_runtime

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
FORWARD = (  # noqa: SIM905 - the order of the extension's arguments
    "max_seqlen_q max_seqlen_kv is_training attn_scale dropout fast_zero_fill qkv_layout o_format "
    "qkv_scale_inv_format bias_type mask_type softmax_type window_size bottom_right cu_seqlens_q "
    "cu_seqlens_kv q k v dtype cu_seqlens_q_padded cu_seqlens_kv_padded"
).split()
BACKWARD = (  # noqa: SIM905
    "max_seqlen_q max_seqlen_kv attn_scale dropout fast_zero_fill qkv_layout o_format do_format "
    "dqkv_layout qkv_scale_inv_format do_scale_inv_format bias_type mask_type softmax_type "
    "window_size bottom_right deterministic cu_seqlens_q cu_seqlens_kv q k v o d_o dtype aux "
    "cu_seqlens_q_padded cu_seqlens_kv_padded"
).split()


class Extension:
    """Stands in for the two functions of TE's extension and keeps their arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(self, *args: Any) -> list[Tensor]:
        call = dict(zip(FORWARD, args, strict=False))
        self.calls.append(call)
        rows, heads, _ = call["q"].shape
        out = call["q"].new_empty(rows, heads, call["v"].shape[2])
        stats = out.new_empty(rows, heads, 1, dtype=torch.float32)
        return [out, stats, out.new_empty(2, dtype=torch.int64)]

    def backward(self, *args: Any) -> list[Tensor]:
        call = dict(zip(BACKWARD, args, strict=False))
        self.calls.append(call)
        return [torch.empty_like(call[name]) for name in "qkv"]


@pytest.fixture
def extension() -> Iterator[Extension]:
    """TE on a GPU of capability 9.0 that is not there, all tensors fake."""
    from transformer_engine.pytorch.attention import dot_product_attention as package
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    module = importlib.import_module(f"{package.__name__}.dot_product_attention")
    backends = importlib.import_module(f"{package.__name__}.backends")
    stand_in = Extension()
    fused = int(fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"])
    choice = (False, None, True, fused, False, [False, True, False])
    with_cp = mock.Mock(side_effect=AssertionError("context parallelism inside TE"))
    patches = [
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(
            torch.cuda, "get_device_properties", return_value=mock.Mock(major=9, minor=0)
        ),
        mock.patch.object(torch.cuda, "Stream", mock.MagicMock()),
        mock.patch.object(module.dpa_utils, "get_attention_backend", return_value=choice),
        mock.patch.object(backends, "attn_forward_func_with_cp", with_cp),
        mock.patch.object(fused_attn.tex, "fused_attn_fwd", stand_in.forward),
        mock.patch.object(fused_attn.tex, "fused_attn_bwd", stand_in.backward),
    ]
    with contextlib.ExitStack() as stack:
        # The fake mode first, while there is no GPU: it then asks CUDA for nothing.
        for patch in [FakeTensorMode(), *patches]:
            stack.enter_context(patch)
        yield stand_in


def exchange(asked: Exchange) -> Tensor:
    return asked.send.new_empty(sum(asked.recv_counts))


def heads(rows: int, count: int) -> Tensor:
    return torch.empty(rows, count, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("window_left", [None, 100])
@pytest.mark.parametrize("name", ["te", "te-module"])
def test_te_is_called_once_a_node_with_local_heads_and_no_cp(
    extension: Extension, name: str, window_left: int | None
) -> None:
    tree = SPTree(4, (1, 2, 4))
    placed = {4: [1000, 301], 2: [200, 7, 50], 1: [33]}
    nodes = [tree.node(degree, 0) for degree, lengths in placed.items() for _ in lengths]
    plan = Plan.from_nodes(tree, [n for lengths in placed.values() for n in lengths], nodes)
    groups: Any = {Node(node.depth, 0): object() for node in nodes if tree.degree(node) > 1}
    kernel = kernel_class(name)()
    runtime = local_runtime(NestedGroups(tree, 0, 0, groups), kernel, overlap=False)
    batch = NestedBatch.build(plan, 0)
    rows, mask = batch.layout.buffer_tokens, AttentionMask(0.125, window_left=window_left)
    with mock.patch.object(executor, "run_exchange", exchange), torch.no_grad():
        q, k, v = heads(rows, NUM_HEADS), *(heads(rows, NUM_KV_HEADS) for _ in range(2))
        out = nested_attention(q, k, v, batch, mask, runtime)
    assert out.shape == (rows, NUM_HEADS, HEAD_DIM)

    assert len(extension.calls) == len(placed)
    by_tokens = {call["q"].shape[0]: call for call in extension.calls}
    parts = {part.degree: part for part in batch.layout.slices}
    for degree, lengths in placed.items():
        call, samples = (
            by_tokens[sum(lengths)],
            batch.rows(parts[degree], mask)[0].blocks[0].samples,
        )
        local = (NUM_HEADS // degree, max(NUM_KV_HEADS // degree, 1))
        assert call["q"].shape == (sum(lengths), local[0], HEAD_DIM)
        assert call["k"].shape == call["v"].shape == (sum(lengths), local[1], HEAD_DIM)
        assert sorted(np.diff(samples.bounds).tolist()) == sorted(lengths)
        for bounds in ("cu_seqlens_q", "cu_seqlens_kv"):
            assert call[bounds] is samples.cu_seqlens(q.device)
            assert call[f"{bounds}_padded"] is call[bounds]
        assert call["max_seqlen_q"] == call["max_seqlen_kv"] == max(lengths)
        assert (call["attn_scale"], call["dropout"]) == (0.125, 0.0)
        assert call["window_size"] == (-1 if window_left is None else window_left, 0)
        assert str(call["mask_type"]).endswith("NVTE_PADDING_CAUSAL_MASK")
        assert str(call["qkv_layout"]).endswith("NVTE_THD_THD_THD")
        assert str(call["o_format"]).endswith("NVTE_THD")
        assert str(call["bias_type"]).endswith("NVTE_NO_BIAS")
        assert not call["bottom_right"]


@pytest.mark.parametrize("name", ["te", "te-module"])
def test_tails_align_at_the_bottom_right(extension: Extension, name: str) -> None:
    samples = SampleBounds(np.array([0, 5, 20]), np.array([0, 9, 40]))
    kernel = kernel_class(name)()
    q, k, v = heads(20, 8), heads(40, 2), heads(40, 2)
    out, lse = kernel.forward(q, k, v, VarlenCall(samples, AttentionMask(0.125)))
    assert out.shape == q.shape and lse.shape == (8, 20 if kernel.returns_lse else 0)
    (call,) = extension.calls
    assert str(call["mask_type"]).endswith("PADDING_CAUSAL_BOTTOM_RIGHT_MASK")
    assert call["bottom_right"]
    assert (call["max_seqlen_q"], call["max_seqlen_kv"]) == (15, 31)


def test_saved_output_and_lse_reach_the_backward(extension: Extension) -> None:
    """Both were made elsewhere: no forward of this call has run."""
    call = VarlenCall(SampleBounds(np.array([0, 5, 20])), AttentionMask(0.125))
    kernel = kernel_class("te")()
    q, k, v = heads(20, 8), heads(20, 2), heads(20, 2)
    kernel.forward(q, k, v, call)
    out, dout = heads(20, 8), heads(20, 8)
    lse = torch.empty(8, 20, device="cuda", dtype=torch.float32)
    grads = kernel.backward(dout, AttentionState(q, k, v, out, lse), call)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    given = extension.calls[-1]
    assert given["o"] is out and given["d_o"] is dout
    stats, rng_state = given["aux"]
    assert (stats.shape, stats.dtype) == ((20, 8, 1), torch.float32)
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    assert str(given["do_format"]).endswith("NVTE_THD")
    assert str(given["dqkv_layout"]).endswith("NVTE_THD_THD_THD")
    assert given["deterministic"] is False
