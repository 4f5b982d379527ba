"""flash-attn 3, for GPUs of compute capability 9.0; its module is `flash_attn_interface`.

Two interfaces are about. The first (flash-attn 2.8.3's folder hopper) takes the window as a pair
and has no defaults for what it is seldom called with; the second (3.0.0) is a torch operator that
takes the window as two numbers and calls the mask of backward `is_causal`.
"""

import inspect
from typing import Any

import torch
from flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic, round_up, window

LEAST_NONDETERMINISTIC_DIM = 256
"""From this head dim on backward has no deterministic form."""

# Arguments of the first interface's forward that we have no use for.
_UNUSED = (
    *("k_new", "v_new", "qv", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table"),
    *("kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
    *("q_descale", "k_descale", "v_descale"),
)


class FlashAttn3Kernel(PaddedKernel):
    """flash-attn 3 on CUDA tensors of 16-bit floats."""

    name = "flash-attn-3"

    def __init__(self) -> None:
        """Finds out which interface is installed."""
        # A torch operator has no signature of its own.
        self.takes_pair = "window_size" in inspect.signature(_flash_attn_forward).parameters

    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """See `PaddedKernel.head_dims`; keys up to 192 with values up to 128 stay as they are."""
        key_dim, value_dim = round_up(head_dim), round_up(value_dim)
        if 128 < key_dim <= 192 and 96 < value_dim <= 128:
            return key_dim, value_dim
        return (max(key_dim, value_dim),) * 2

    def _arguments(self, q_SHD: Tensor, samples: SampleBounds, mask: AttentionMask) -> dict:
        left, right = window(mask)
        arguments: dict[str, Any] = {
            "cu_seqlens_q": samples.cu_seqlens(q_SHD.device),
            "cu_seqlens_k": samples.cu_seqlens_kv(q_SHD.device),
            "max_seqlen_q": samples.max_length,
            "max_seqlen_k": samples.max_kv_length,
            "softmax_scale": mask.softmax_scale,
        }
        if self.takes_pair:
            return arguments | {"window_size": (left, right)}
        return arguments | {"window_size_left": left, "window_size_right": right}

    def run_forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedKernel.run_forward`."""
        unused = dict.fromkeys(_UNUSED) if self.takes_pair else {}
        out_SHV, lse_HS, *_ = _flash_attn_forward(
            q_SHD,
            k_CKD,
            v_CKV,
            causal=mask.is_causal,
            **unused,
            **self._arguments(q_SHD, samples, mask),
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
        """See `PaddedKernel.run_backward`.

        Raises:
            ValueError: the same bits are asked for at a head dim that has no such form.
        """
        if is_deterministic() and q_SHD.shape[2] >= LEAST_NONDETERMINISTIC_DIM:
            raise ValueError(
                f"--nsp-kernel flash-attn-3 is deterministic below head dim "
                f"{LEAST_NONDETERMINISTIC_DIM} only, got {q_SHD.shape[2]}"
            )
        dq, dk, dv = torch.empty_like(q_SHD), torch.empty_like(k_CKD), torch.empty_like(v_CKV)
        causal = "causal" if self.takes_pair else "is_causal"
        _flash_attn_backward(
            dout_SHV,
            q_SHD,
            k_CKD,
            v_CKV,
            out_SHV,
            lse_HS,
            sequed_q=None,
            sequed_k=None,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=is_deterministic(),
            **{causal: mask.is_causal},
            **self._arguments(q_SHD, samples, mask),
        )
        return dq, dk, dv
