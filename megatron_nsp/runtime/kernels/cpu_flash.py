"""torch's CPU flash attention, one call a sample: it has no variable-length form.

The private operator is used because the public one does not return the LSE. Its traps: a sequence
of no tokens kills the process, head counts go unchecked, values must have the head dim of keys, and
`is_causal` aligns top-left, so that windows and queries that are the tail of their keys get their
mask as numbers. In 16 bits it takes other paths on other processors, one of which raises where
`ATEN_CPU_CAPABILITY` is below the processor's: 16-bit inputs are computed in float32, and each
result is rounded once.
"""

from typing import Any, override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import (
    AttentionMask,
    AttentionState,
    VarlenCall,
    hidden_keys,
    lse_dtype,
)
from megatron_nsp.runtime.kernels.needs import Needs
from megatron_nsp.runtime.kernels.padded import PaddedKernel

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x_SHD: Tensor) -> Tensor:
    """`[1, H, S, D]` in at least float32; a view where it is that already."""
    return x_SHD.to(lse_dtype(x_SHD.dtype)).transpose(0, 1).unsqueeze(0)


def _mask_arguments(q_SHD: Tensor, k_CKD: Tensor, mask: AttentionMask) -> tuple[bool, Any]:
    """The operator's `is_causal` and `attn_mask` for one sample."""
    num_queries, num_keys = q_SHD.shape[0], k_CKD.shape[0]
    reaches_all = mask.window_left is None or mask.window_left >= num_keys - 1
    if not mask.is_causal or (num_queries == num_keys and reaches_all):
        return mask.is_causal, None
    hidden = hidden_keys(num_queries, num_keys, mask, q_SHD.device)
    assert hidden is not None
    return False, torch.zeros_like(hidden, dtype=lse_dtype(q_SHD.dtype)).masked_fill_(
        hidden, float("-inf")
    )


class CpuFlashKernel(PaddedKernel):
    """Flash attention on CPU tensors of any float dtype."""

    name = "cpu-flash"
    needs = Needs("cpu")
    takes_32_bits = True

    @override
    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        return (max(head_dim, value_dim),) * 2  # one for both, of any size

    @override
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        out_SHV = torch.empty_like(q_SHD)
        lse_HS = q_SHD.new_empty(q_SHD.shape[1], q_SHD.shape[0], dtype=lse_dtype(q_SHD.dtype))
        for rows, keys in zip(call.samples.slices, call.samples.kv_slices, strict=True):
            q, k, v = q_SHD[rows], k_CKD[keys], v_CKV[keys]
            is_causal, attn_mask = _mask_arguments(q, k, call.mask)
            out, lse = _forward(
                *(_heads_first(x) for x in (q, k, v)),
                0.0,
                is_causal,
                attn_mask=attn_mask,
                scale=call.mask.softmax_scale,
            )
            out_SHV[rows] = out[0].transpose(0, 1)
            lse_HS[:, rows] = lse[0]
        return out_SHV, lse_HS

    @override
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_SHD, k_CKD, v_CKV, out_SHV, lse_HS = state.tensors
        grads = torch.empty_like(q_SHD), torch.empty_like(k_CKD), torch.empty_like(v_CKV)
        for rows, keys in zip(call.samples.slices, call.samples.kv_slices, strict=True):
            q, k, v = q_SHD[rows], k_CKD[keys], v_CKV[keys]
            is_causal, attn_mask = _mask_arguments(q, k, call.mask)
            parts = _backward(
                *(_heads_first(x) for x in (dout_SHV[rows], q, k, v, out_SHV[rows])),
                lse_HS[:, rows].unsqueeze(0),
                0.0,
                is_causal,
                attn_mask=attn_mask,
                scale=call.mask.softmax_scale,
            )
            for grad, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                grad[where] = part[0].transpose(0, 1)
        return grads
