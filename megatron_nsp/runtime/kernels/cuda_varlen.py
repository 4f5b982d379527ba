"""torch's own variable-length flash attention on CUDA; needs no package beside torch.

A causal mask is the window (-1, 0): everything before a token, nothing after it, with the last
query at the last key. With that window torch always takes its flash kernel, whose LSE is the
float32 `[H, S]` that the contract asks for.
"""

import torch
import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds
from megatron_nsp.runtime.kernels.padded import PaddedKernel, window


class CudaVarlenKernel(PaddedKernel):
    """Flash attention on CUDA tensors of 16-bit floats."""

    name = "cuda-varlen"

    def run_forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedKernel.run_forward`."""
        out_SHV, lse_HS, _ = torch.ops.torch_attn._varlen_attn(
            q_SHD,
            k_CKD,
            v_CKV,
            samples.cu_seqlens(q_SHD.device),
            samples.cu_seqlens_kv(q_SHD.device),
            samples.max_length,
            samples.max_kv_length,
            mask.is_causal,
            scale=mask.softmax_scale,
            window_size=list(window(mask)),
            enable_gqa=q_SHD.shape[1] != k_CKD.shape[1],
        )
        return out_SHV, lse_HS

    def run_backward(
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
        """See `PaddedKernel.run_backward`."""
        # The operator takes the dropout state of forward; without dropout it is never read.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_SHD.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
            dout_SHV,
            q_SHD,
            k_CKD,
            v_CKV,
            out_SHV,
            lse_HS,
            samples.cu_seqlens(q_SHD.device),
            samples.cu_seqlens_kv(q_SHD.device),
            samples.max_length,
            samples.max_kv_length,
            mask.is_causal,
            rng_state,
            scale=mask.softmax_scale,
            window_size=list(window(mask)),
        )
        return grads
