"""flash-attn 4, whose kernels are compiled as they are first called; GPUs from capability 9.0 on.

Unlike its elders it takes out before dout in backward and returns the gradients, and a side of the
window without a limit is None.
"""

from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic, round_up

WIDE_KEYS = (192, 128)
"""Head dims of keys and values that differ and that every GPU's kernel takes."""


class FlashAttn4Kernel(PaddedKernel):
    """flash-attn 4 on CUDA tensors of 16-bit floats."""

    name = "flash-attn-4"

    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """See `PaddedKernel.head_dims`; above 128 there are 192 with 128, and 256."""
        dims = round_up(head_dim), round_up(value_dim)
        if max(dims) <= 128:
            return (max(dims),) * 2
        if dims[0] <= WIDE_KEYS[0] and dims[1] <= WIDE_KEYS[1]:
            return WIDE_KEYS
        return (max(256, *dims),) * 2

    def run_forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedKernel.run_forward`."""
        out_SHV, lse_HS, *_ = _flash_attn_fwd(
            q_SHD,
            k_CKD,
            v_CKV,
            cu_seqlens_q=samples.cu_seqlens(q_SHD.device),
            cu_seqlens_k=samples.cu_seqlens_kv(q_SHD.device),
            max_seqlen_q=samples.max_length,
            max_seqlen_k=samples.max_kv_length,
            softmax_scale=mask.softmax_scale,
            causal=mask.is_causal,
            window_size_left=mask.window_left,
            window_size_right=None,
            return_lse=True,
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
        dq_SHD, dk_CKD, dv_CKV, *_ = _flash_attn_bwd(
            q_SHD,
            k_CKD,
            v_CKV,
            out_SHV,
            dout_SHV,
            lse_HS,
            softmax_scale=mask.softmax_scale,
            causal=mask.is_causal,
            window_size_left=mask.window_left,
            window_size_right=None,
            cu_seqlens_q=samples.cu_seqlens(q_SHD.device),
            cu_seqlens_k=samples.cu_seqlens_kv(q_SHD.device),
            max_seqlen_q=samples.max_length,
            max_seqlen_k=samples.max_kv_length,
            deterministic=is_deterministic(),
        )
        return dq_SHD, dk_CKD, dv_CKV
