"""Stand-ins for Transformer Engine: its fused attention, and its attention module."""

from typing import Any

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import (
    AttentionMask,
    SampleBounds,
    VarlenCall,
    hidden_keys,
)
from tests.dist import recorded_signatures as recorded
from tests.dist.package_calls import (
    Arguments,
    Package,
    bounds_of,
    check_dims,
    gradients,
    mask_of,
    output,
)


def te_mask(a: Arguments, scale: float, samples: SampleBounds) -> AttentionMask:
    """The mask that TE's names mean; without bottom_right a causal mask aligns the starts."""
    kind = a["attn_mask_type"]
    assert kind in ("padding", "padding_causal", "padding_causal_bottom_right")
    assert kind != "padding_causal" or samples.is_square, "would align the starts"
    left, right = a["window_size"]
    assert right == (-1 if kind == "padding" else 0)
    return mask_of(scale, kind != "padding", left, right)


def te(package: Package, is_packed: bool) -> dict[str, dict[str, Any]]:
    """Statistics are `[t, h, 1]`, or `[samples, h, longest, 1]`, both with the values of LSE."""

    def check(a: Arguments) -> VarlenCall:
        assert a["fused_attention_backend"] == "the F16 backend"
        assert a["fake_dtype"] == a["q"].dtype and a["dropout"] == 0.0
        assert (a["qkv_layout"], a["o_format"]) == ("thd_thd_thd", "thd")
        assert a["attn_bias_type"] == "no_bias" and a["softmax_type"] == "vanilla"
        assert a["cu_seqlens_q_padded"] is a["cu_seqlens_q"]
        assert a["cu_seqlens_kv_padded"] is a["cu_seqlens_kv"]
        check_dims(a, lambda d, v: True)
        samples = bounds_of(a, "kv")
        return VarlenCall(samples, te_mask(a, a["attn_scale"], samples))

    def forward(a: Arguments) -> tuple:
        call = check(a)
        samples = call.samples
        assert a["is_training"], "else it gives no statistics"
        out, lse = output(a, call)
        if is_packed:
            stats = lse.transpose(0, 1).contiguous().unsqueeze(2)
        else:
            stats = lse.new_full((len(samples.slices), lse.shape[0], samples.max_length, 1), 1e9)
            for i, rows in enumerate(samples.slices):
                stats[i, :, : rows.stop - rows.start, 0] = lse[:, rows]
        return out, [stats, torch.zeros(2, dtype=torch.int64)]

    def backward(a: Arguments) -> list:
        call = check(a)
        samples = call.samples
        assert (a["do_format"], a["dqkv_layout"]) == ("thd", "thd_thd_thd")
        stats, rng_state = a["aux_ctx_tensors"]
        assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
        assert stats.is_contiguous() and stats.dim() == (3 if is_packed else 4)
        if is_packed:
            lse = stats.squeeze(2).transpose(0, 1)
        else:
            parts = [
                stats[i, :, : rows.stop - rows.start, 0] for i, rows in enumerate(samples.slices)
            ]
            lse = torch.cat(parts, dim=1)
        a = a | {"lse": lse.contiguous()}
        return [*gradients(a, call, "d_o q k v o lse"), None, None]

    return {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.cpp_extensions": {},
        "transformer_engine.pytorch.cpp_extensions.fused_attn": {
            "FusedAttnBackend": {"F16_arbitrary_seqlen": "the F16 backend"},
            "fused_attn_fwd": package.function(recorded.TE_FORWARD, forward),
            "fused_attn_bwd": package.function(recorded.TE_BACKWARD, backward),
        },
    }


def plain_attention(q: Tensor, k: Tensor, v: Tensor, call: VarlenCall) -> Tensor:
    """Attention that autograd can differentiate."""
    samples, mask, outs = call.samples, call.mask, []
    for rows, keys in zip(samples.slices, samples.kv_slices, strict=True):
        repeat = q.shape[1] // k.shape[1]
        a, b, c = (
            q[rows],
            *(x[keys].repeat_interleave(repeat, dim=1) for x in (k, v)),
        )
        scores = torch.einsum("shd,chd->hsc", a, b) * mask.softmax_scale
        hidden = hidden_keys(a.shape[0], b.shape[0], mask, a.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hsc,chd->shd", torch.softmax(scores, dim=2), c))
    return torch.cat(outs)


def te_module(package: Package) -> dict[str, dict[str, Any]]:
    """A DotProductAttention that attends; it knows its sizes and has no CP group."""

    class DotProductAttention:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = recorded.TE_MODULE.bind(*args, **kwargs)
            bound.apply_defaults()
            self.settings = bound.arguments
            assert self.settings["attention_dropout"] == 0.0
            assert self.settings["cp_group"] is None and self.settings["tp_size"] == 1

        def attend(self, a: Arguments) -> Tensor:
            q, k, v = (a[f"{name}_layer"] for name in ("query", "key", "value"))
            assert q.shape[1:] == (
                self.settings["num_attention_heads"],
                self.settings["kv_channels"][0],
            )
            assert v.shape[1:] == (
                self.settings["num_gqa_groups"],
                self.settings["kv_channels"][1],
            )
            assert self.settings["qkv_format"] == "thd" and a["pad_between_seqs"] is False
            assert all(x.storage_offset() == 0 for x in (q, k, v)), "layout would not be known"
            check_dims({"q": q, "k": k, "v": v}, lambda d, v: True)
            samples = bounds_of({**a, "q": q, "k": k}, "kv")
            mask = te_mask(a, self.settings["softmax_scale"], samples)
            return plain_attention(q, k, v, VarlenCall(samples, mask)).flatten(1)

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            return package.function(recorded.TE_MODULE_FORWARD, self.attend)(*args, **kwargs)

    modules = te(Package(), is_packed=True)
    modules["transformer_engine.pytorch"]["DotProductAttention"] = DotProductAttention
    return modules
