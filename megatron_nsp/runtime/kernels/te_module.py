"""Transformer Engine's DotProductAttention on the heads that a rank holds, no CP group inside.

The module chooses among TE's own kernels by its own rules, and it keeps its LSE to itself. So its
output cannot be saved for a backward of ours: backward runs the module's forward again, with grad.
"""

import torch
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention

from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds
from megatron_nsp.runtime.kernels.padded import PaddedKernel, round_up, window
from megatron_nsp.runtime.kernels.te import mask_type
from megatron_nsp.runtime.kernels.te_attention import attention_module


class TeModuleKernel(PaddedKernel):
    """TE's attention module on CUDA tensors of 16-bit floats; `lse_HS` is `[H, 0]`."""

    name = "te-module"
    returns_lse = False

    def __init__(self) -> None:
        """Modules are made as shapes come; without parameters they hold nothing but settings."""
        self.modules: dict[tuple, DotProductAttention] = {}

    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """See `PaddedKernel.head_dims`."""
        return round_up(head_dim), round_up(value_dim)

    def _attend(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> Tensor:
        (_, num_heads, head_dim), (_, num_kv_heads, value_dim) = q_SHD.shape, v_CKV.shape
        key = (num_heads, num_kv_heads, head_dim, value_dim, mask.softmax_scale)
        if key not in self.modules:
            self.modules[key] = attention_module(*key)
        out = self.modules[key](
            *(from_the_start(x) for x in (q_SHD, k_CKD, v_CKV)),
            cu_seqlens_q=samples.cu_seqlens(q_SHD.device),
            cu_seqlens_kv=samples.cu_seqlens_kv(q_SHD.device),
            max_seqlen_q=samples.max_length,
            max_seqlen_kv=samples.max_kv_length,
            attn_mask_type=mask_type(samples, mask),
            window_size=window(mask),
            pad_between_seqs=False,
        )
        attended: Tensor = out.view(-1, num_heads, value_dim)
        return attended

    def run_forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedKernel.run_forward`."""
        with torch.no_grad():
            out_SHV = self._attend(q_SHD, k_CKD, v_CKV, samples, mask)
        return out_SHV, q_SHD.new_empty(q_SHD.shape[1], 0, dtype=torch.float32)

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
        """See `PaddedKernel.run_backward`; neither `out_SHV` nor `lse_HS` is used."""
        q, k, v = (x.detach().requires_grad_() for x in (q_SHD, k_CKD, v_CKV))
        with torch.enable_grad():
            again_SHV = self._attend(q, k, v, samples, mask)
            dq_SHD, dk_CKD, dv_CKV = torch.autograd.grad(again_SHV, (q, k, v), dout_SHV)
        return dq_SHD, dk_CKD, dv_CKV


def from_the_start(x_SHD: Tensor) -> Tensor:
    """`x_SHD` at the start of its storage, copied if it is not.

    TE guesses the layout of q, k and v from where they lie in memory, and refuses the rows of a
    node in the middle of a rank's buffer.
    """
    return x_SHD if x_SHD.storage_offset() == 0 else x_SHD.clone()
