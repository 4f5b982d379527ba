"""The package flash-attn 2: its variable-length operators, which give and take the LSE.

One head dim for keys and values, at most 256. Gradients are written into tensors of ours.
"""

import torch
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic, window


class FlashAttn2Kernel(PaddedKernel):
    """flash-attn 2.7.3 and later, on CUDA tensors of 16-bit floats."""

    name = "flash-attn-2"

    def run_forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedKernel.run_forward`."""
        left, right = window(mask)
        out_SHV, lse_HS, _, _ = _flash_attn_varlen_forward(
            q_SHD,
            k_CKD,
            v_CKV,
            samples.cu_seqlens(q_SHD.device),
            samples.cu_seqlens_kv(q_SHD.device),
            samples.max_length,
            samples.max_kv_length,
            dropout_p=0.0,
            softmax_scale=mask.softmax_scale,
            causal=mask.is_causal,
            window_size_left=left,
            window_size_right=right,
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
        left, right = window(mask)
        grads = torch.empty_like(q_SHD), torch.empty_like(k_CKD), torch.empty_like(v_CKV)
        _flash_attn_varlen_backward(
            dout_SHV,
            q_SHD,
            k_CKD,
            v_CKV,
            out_SHV,
            lse_HS,
            *grads,
            samples.cu_seqlens(q_SHD.device),
            samples.cu_seqlens_kv(q_SHD.device),
            samples.max_length,
            samples.max_kv_length,
            dropout_p=0.0,
            softmax_scale=mask.softmax_scale,
            causal=mask.is_causal,
            window_size_left=left,
            window_size_right=right,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=is_deterministic(),
        )
        return grads
