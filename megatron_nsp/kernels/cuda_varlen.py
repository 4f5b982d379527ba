"""torch's own variable-length flash attention on CUDA; needs no package beside torch.

A causal mask is the window (-1, 0): everything before a token, nothing after it. With that window
torch always takes its flash kernel, whose LSE is the float32 `[H, S]` that the contract asks for.
"""

import torch
import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn
from torch import Tensor

from megatron_nsp.kernels.base import AttentionMask, SampleBounds, check_contiguous, check_heads


def _window(mask: AttentionMask) -> list[int]:
    return [-1, 0] if mask.is_causal else [-1, -1]


class CudaVarlenKernel:
    """Flash attention on CUDA tensors of 16-bit floats."""

    name = "cuda-varlen"

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
        cu_seqlens = samples.cu_seqlens(q_SHD.device)
        out_SHD, lse_HS, _ = torch.ops.torch_attn._varlen_attn(
            q_SHD,
            k_SKD,
            v_SKD,
            cu_seqlens,
            cu_seqlens,
            samples.max_length,
            samples.max_length,
            mask.is_causal,
            scale=mask.softmax_scale,
            window_size=_window(mask),
            enable_gqa=q_SHD.shape[1] != k_SKD.shape[1],
        )
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
        cu_seqlens = samples.cu_seqlens(q_SHD.device)
        # The operator takes the dropout state of forward; without dropout it is never read.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_SHD.device)
        dq_SHD, dk_SKD, dv_SKD = torch.ops.torch_attn._varlen_attn_backward(
            dout_SHD,
            q_SHD,
            k_SKD,
            v_SKD,
            out_SHD,
            lse_HS,
            cu_seqlens,
            cu_seqlens,
            samples.max_length,
            samples.max_length,
            mask.is_causal,
            rng_state,
            scale=mask.softmax_scale,
            window_size=_window(mask),
        )
        return dq_SHD, dk_SKD, dv_SKD
