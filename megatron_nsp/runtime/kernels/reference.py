"""Attention by its definition: the yardstick of the other kernels, slow and simple.

For each sample: scores s = scale * q k^T, masked; p = softmax(s); out = p v. Backward follows from
p = exp(s - lse): ds = p * (dout v^T - rowsum(dout * out)).
"""

from typing import override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import (
    AttentionKernel,
    AttentionMask,
    AttentionState,
    VarlenCall,
    check_contiguous,
    check_heads,
    hidden_keys,
    lse_dtype,
)


def _scores(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    scores = torch.einsum("shd,chd->hsc", q, k) * mask.softmax_scale
    hidden = hidden_keys(q.shape[0], k.shape[0], mask, q.device)
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


class ReferenceKernel(AttentionKernel):
    """Plain attention in the input's dtype, or float32 for 16-bit inputs."""

    name = "reference"
    takes_32_bits = True

    @override
    def forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        check_heads(q_SHD, k_CKD)
        check_contiguous(q_SHD, k_CKD, v_CKV)
        dtype, repeat = lse_dtype(q_SHD.dtype), q_SHD.shape[1] // k_CKD.shape[1]
        out_SHV = q_SHD.new_empty(*q_SHD.shape[:2], v_CKV.shape[2])
        lse_HS = q_SHD.new_empty(q_SHD.shape[1], q_SHD.shape[0], dtype=dtype)
        for rows, keys in zip(call.samples.slices, call.samples.kv_slices, strict=True):
            q = q_SHD[rows].to(dtype)
            k, v = (x[keys].to(dtype).repeat_interleave(repeat, dim=1) for x in (k_CKD, v_CKV))
            scores = _scores(q, k, call.mask)
            lse_HS[:, rows] = torch.logsumexp(scores, dim=-1)
            # exp(scores - lse) would add up to 1 only within the rounding of an LSE of thousands.
            probs = torch.softmax(scores, dim=-1)
            out_SHV[rows] = torch.einsum("hsc,chd->shd", probs, v).to(q_SHD.dtype)
        return out_SHV, lse_HS

    @override
    def backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_SHD, k_CKD, v_CKV, out_SHV, lse_HS = state.tensors
        check_contiguous(dout_SHV, q_SHD, k_CKD, v_CKV, out_SHV)
        dtype, repeat = lse_HS.dtype, q_SHD.shape[1] // k_CKD.shape[1]
        dq_SHD, dk_CKD, dv_CKV = (torch.empty_like(x) for x in (q_SHD, k_CKD, v_CKV))
        for rows, keys in zip(call.samples.slices, call.samples.kv_slices, strict=True):
            q, out, dout = (x[rows].to(dtype) for x in (q_SHD, out_SHV, dout_SHV))
            k, v = (x[keys].to(dtype).repeat_interleave(repeat, dim=1) for x in (k_CKD, v_CKV))
            probs = torch.exp(_scores(q, k, call.mask) - lse_HS[:, rows].unsqueeze(-1))
            dprobs = torch.einsum("shd,chd->hsc", dout, v)
            row_sum = (dout * out).sum(dim=-1).transpose(0, 1).unsqueeze(-1)
            dscores = probs * (dprobs - row_sum) * call.mask.softmax_scale
            dq_SHD[rows] = torch.einsum("hsc,chd->shd", dscores, k).to(q_SHD.dtype)
            dk = torch.einsum("hsc,shd->chd", dscores, q).unflatten(1, (-1, repeat)).sum(2)
            dv = torch.einsum("hsc,shd->chd", probs, dout).unflatten(1, (-1, repeat)).sum(2)
            dk_CKD[keys] = dk.to(k_CKD.dtype)
            dv_CKV[keys] = dv.to(v_CKV.dtype)
        return dq_SHD, dk_CKD, dv_CKV
