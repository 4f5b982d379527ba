"""torch's own variable-length flash attention on CUDA; needs no package beside torch.

A causal mask is the window (-1, 0): everything before a token, nothing after it, with the last
query at the last key. With that window torch always takes its flash kernel, whose LSE is the
float32 `[H, S]` that the contract asks for.
"""

import torch
import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn
from torch import Tensor

from megatron_nsp.kernels.base import (
    AttentionMask,
    SampleBounds,
    check_contiguous,
    check_heads,
    pad_head_dim,
)


def _window(mask: AttentionMask) -> list[int]:
    left = -1 if mask.window_left is None else mask.window_left
    return [left, 0] if mask.is_causal else [-1, -1]


class CudaVarlenKernel:
    """Flash attention on CUDA tensors of 16-bit floats."""

    name = "cuda-varlen"

    def forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        check_heads(q_SHD, k_CKD)
        check_contiguous(q_SHD, k_CKD, v_CKV)
        head_dim = max(q_SHD.shape[2], v_CKV.shape[2])
        out_SHD, lse_HS, _ = torch.ops.torch_attn._varlen_attn(
            *(pad_head_dim(x, head_dim) for x in (q_SHD, k_CKD, v_CKV)),
            samples.cu_seqlens(q_SHD.device),
            samples.cu_seqlens_kv(q_SHD.device),
            samples.max_length,
            samples.max_kv_length,
            mask.is_causal,
            scale=mask.softmax_scale,
            window_size=_window(mask),
            enable_gqa=q_SHD.shape[1] != k_CKD.shape[1],
        )
        return out_SHD[..., : v_CKV.shape[2]].contiguous(), lse_HS

    def backward(
        self,
        dout_SHV: Tensor,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        out_SHV: Tensor,
        lse_HS: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        check_contiguous(dout_SHV, q_SHD, k_CKD, v_CKV, out_SHV)
        head_dim, value_dim = max(q_SHD.shape[2], v_CKV.shape[2]), v_CKV.shape[2]
        # The operator takes the dropout state of forward; without dropout it is never read.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_SHD.device)
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            *(pad_head_dim(x, head_dim) for x in (dout_SHV, q_SHD, k_CKD, v_CKV, out_SHV)),
            lse_HS,
            samples.cu_seqlens(q_SHD.device),
            samples.cu_seqlens_kv(q_SHD.device),
            samples.max_length,
            samples.max_kv_length,
            mask.is_causal,
            rng_state,
            scale=mask.softmax_scale,
            window_size=_window(mask),
        )
        return dq[..., : q_SHD.shape[2]], dk[..., : k_CKD.shape[2]], dv[..., :value_dim]
