"""Attention by its definition: the yardstick of the other kernels, slow and simple.

For each sample: scores s = scale * q k^T, masked; p = softmax(s); out = p v. Backward follows from
p = exp(s - lse): ds = p * (dout v^T - rowsum(dout * out)).
"""

import torch
from torch import Tensor

from megatron_nsp.kernels.base import (
    AttentionMask,
    SampleBounds,
    check_contiguous,
    check_heads,
    lse_dtype,
)


def _scores(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    scores = torch.einsum("shd,thd->hst", q, k) * mask.softmax_scale
    if mask.is_causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


class ReferenceKernel:
    """Plain attention in the input's dtype, or float32 for 16-bit inputs."""

    name = "reference"

    def forward(
        self,
        q_SHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        check_heads(q_SHD, k_SKD)
        check_contiguous(q_SHD, k_SKD, v_SKD)
        dtype, repeat = lse_dtype(q_SHD.dtype), q_SHD.shape[1] // k_SKD.shape[1]
        out_SHD = torch.empty_like(q_SHD)
        lse_HS = q_SHD.new_empty(q_SHD.shape[1], q_SHD.shape[0], dtype=dtype)
        for rows in samples.slices:
            q = q_SHD[rows].to(dtype)
            k, v = (x[rows].to(dtype).repeat_interleave(repeat, dim=1) for x in (k_SKD, v_SKD))
            scores = _scores(q, k, mask)
            lse = torch.logsumexp(scores, dim=-1)
            lse_HS[:, rows] = lse
            probs = torch.exp(scores - lse.unsqueeze(-1))
            out_SHD[rows] = torch.einsum("hst,thd->shd", probs, v).to(q_SHD.dtype)
        return out_SHD, lse_HS

    def backward(
        self,
        dout_SHD: Tensor,
        q_SHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_SHD: Tensor,
        lse_HS: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        check_contiguous(dout_SHD, q_SHD, k_SKD, v_SKD, out_SHD)
        dtype, repeat = lse_HS.dtype, q_SHD.shape[1] // k_SKD.shape[1]
        dq_SHD, dk_SKD, dv_SKD = (torch.empty_like(x) for x in (q_SHD, k_SKD, v_SKD))
        for rows in samples.slices:
            q, out, dout = (x[rows].to(dtype) for x in (q_SHD, out_SHD, dout_SHD))
            k, v = (x[rows].to(dtype).repeat_interleave(repeat, dim=1) for x in (k_SKD, v_SKD))
            probs = torch.exp(_scores(q, k, mask) - lse_HS[:, rows].unsqueeze(-1))
            dprobs = torch.einsum("shd,thd->hst", dout, v)
            row_sum = (dout * out).sum(dim=-1).transpose(0, 1).unsqueeze(-1)
            dscores = probs * (dprobs - row_sum) * mask.softmax_scale
            dq_SHD[rows] = torch.einsum("hst,thd->shd", dscores, k).to(q_SHD.dtype)
            dk = torch.einsum("hst,shd->thd", dscores, q).unflatten(1, (-1, repeat)).sum(2)
            dv = torch.einsum("hst,shd->thd", probs, dout).unflatten(1, (-1, repeat)).sum(2)
            dk_SKD[rows] = dk.to(k_SKD.dtype)
            dv_SKD[rows] = dv.to(v_SKD.dtype)
        return dq_SHD, dk_SKD, dv_SKD
