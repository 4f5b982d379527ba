"""Transformer Engine's fused attention (cuDNN), with the LSE given and taken back.

`fused_attn_fwd` and `fused_attn_bwd` are what TE's own modules call. Backward takes the output and
the softmax statistics as tensors, and TE's ring hands it merged ones, so saved and merged values
are as good as those of a forward just run. Beside them it wants the random state of dropout, two
numbers that nothing reads where dropout is 0.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    FusedAttnBackend,
    fused_attn_bwd,
    fused_attn_fwd,
)

from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic, round_up, window

if "do_format" not in inspect.signature(fused_attn_bwd).parameters:
    raise ImportError("its fused attention is that of a version before 2.15")


def mask_type(samples: SampleBounds, mask: AttentionMask) -> str:
    """TE's name of the mask; where the queries are all of their keys both alignments agree."""
    if not mask.is_causal:
        return "padding"
    return "padding_causal" if samples.is_square else "padding_causal_bottom_right"


class TeKernel(PaddedKernel):
    """cuDNN attention on CUDA tensors of 16-bit floats."""

    name = "te"

    def __init__(self) -> None:
        """The form of the statistics is learnt from the first forward."""
        self.are_stats_packed: bool | None = None

    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """See `PaddedKernel.head_dims`; cuDNN takes values of another dim."""
        return round_up(head_dim), round_up(value_dim)

    def _arguments(self, q_SHD: Tensor, samples: SampleBounds, mask: AttentionMask) -> dict:
        cu_seqlens = samples.cu_seqlens(q_SHD.device)
        cu_seqlens_kv = samples.cu_seqlens_kv(q_SHD.device)
        return {
            "max_seqlen_q": samples.max_length,
            "max_seqlen_kv": samples.max_kv_length,
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_kv": cu_seqlens_kv,
            # Where the rows of each sample start: no padding lies between samples.
            "cu_seqlens_q_padded": cu_seqlens,
            "cu_seqlens_kv_padded": cu_seqlens_kv,
            "fake_dtype": q_SHD.dtype,
            "fused_attention_backend": FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": mask.softmax_scale,
            "dropout": 0.0,
            "qkv_layout": "thd_thd_thd",
            "o_format": "thd",
            "attn_mask_type": mask_type(samples, mask),
            "window_size": window(mask),
        }

    def run_forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedKernel.run_forward`."""
        arguments = self._arguments(q_SHD, samples, mask)
        out_SHV, aux, *_ = fused_attn_fwd(is_training=True, q=q_SHD, k=k_CKD, v=v_CKV, **arguments)
        self.are_stats_packed = aux[0].dim() == 3
        return out_SHV, lse_of_stats(aux[0], samples)

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
        assert self.are_stats_packed is not None, "backward of a kernel that never ran forward"
        stats = stats_of_lse(lse_HS, samples, self.are_stats_packed)
        rng_state = torch.zeros(2, dtype=torch.int64, device=q_SHD.device)
        grads: list[Any] = fused_attn_bwd(
            q=q_SHD,
            k=k_CKD,
            v=v_CKV,
            o=out_SHV,
            d_o=dout_SHV,
            aux_ctx_tensors=[stats, rng_state],
            do_format="thd",
            dqkv_layout="thd_thd_thd",
            deterministic=is_deterministic(),
            **self._arguments(q_SHD, samples, mask),
        )
        return grads[0], grads[1], grads[2]


def lse_of_stats(stats: Tensor, samples: SampleBounds) -> Tensor:
    """`lse_HS` from cuDNN's statistics.

    Args:
        stats: `[S, H, 1]`, or `[samples, H, longest, 1]` on some GPUs and with older cuDNN.
        samples: where the queries of each sample start.
    """
    if stats.dim() == 3:
        return stats.squeeze(2).transpose(0, 1).contiguous()
    lengths = (rows.stop - rows.start for rows in samples.slices)
    return torch.cat([stats[i, :, :n, 0] for i, n in enumerate(lengths)], dim=1)


def stats_of_lse(lse_HS: Tensor, samples: SampleBounds, is_packed: bool) -> Tensor:
    """The inverse of `lse_of_stats`; what lies behind the end of a sample is zero."""
    if is_packed:
        return lse_HS.transpose(0, 1).contiguous().unsqueeze(2)
    num_heads = lse_HS.shape[0]
    stats = lse_HS.new_zeros(len(samples.slices), num_heads, samples.max_length, 1)
    for i, rows in enumerate(samples.slices):
        stats[i, :, : rows.stop - rows.start, 0] = lse_HS[:, rows]
    return stats
