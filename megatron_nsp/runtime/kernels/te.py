"""Transformer Engine's fused attention (cuDNN), with the LSE given and taken back.

`fused_attn_fwd` and `fused_attn_bwd` are what TE's own modules call. Backward takes the output and
the softmax statistics as tensors, and TE's ring hands it merged ones, so saved and merged values
are as good as those of a forward just run. Beside them it wants the random state of dropout, two
numbers that nothing reads where dropout is 0.
"""

import inspect
from typing import Any, override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionState, SampleBounds, VarlenCall
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic, round_up
from megatron_nsp.runtime.kernels.te_attention import TE, te_arguments, without_padding


class TeKernel(PaddedKernel):
    """cuDNN attention on CUDA tensors of 16-bit floats."""

    name = "te"
    needs = TE
    deterministic_is_heavy_on = (9,)

    def __init__(self) -> None:
        """Loads the package; the form of the statistics is learnt from the first forward."""
        from transformer_engine.pytorch.cpp_extensions.fused_attn import (
            FusedAttnBackend,
            fused_attn_bwd,
            fused_attn_fwd,
        )

        if "do_format" not in inspect.signature(fused_attn_bwd).parameters:
            raise ImportError("its fused attention is that of a version before 2.15")
        self._forward, self._backward = fused_attn_fwd, fused_attn_bwd
        self._backend = FusedAttnBackend["F16_arbitrary_seqlen"]
        self.are_stats_packed: bool | None = None

    @override
    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        return round_up(head_dim), round_up(value_dim)

    def _arguments(self, call: VarlenCall, q_SHD: Tensor) -> dict[str, Any]:
        shared = te_arguments(call, q_SHD.device)
        return {
            **shared,
            **without_padding(shared),
            "fake_dtype": q_SHD.dtype,
            "fused_attention_backend": self._backend,
            "attn_scale": call.mask.softmax_scale,
            "dropout": 0.0,
            "qkv_layout": "thd_thd_thd",
            "o_format": "thd",
        }

    @override
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        arguments = self._arguments(call, q_SHD)
        out_SHV, aux, *_ = self._forward(is_training=True, q=q_SHD, k=k_CKD, v=v_CKV, **arguments)
        self.are_stats_packed = aux[0].dim() == 3
        return out_SHV, lse_of_stats(aux[0], call.samples)

    @override
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.are_stats_packed is not None, "backward of a kernel that never ran forward"
        stats = stats_of_lse(state.lse_HS, call.samples, self.are_stats_packed)
        rng_state = torch.zeros(2, dtype=torch.int64, device=dout_SHV.device)
        dq_SHD, dk_CKD, dv_CKV, *_ = self._backward(
            q=state.q_SHD,
            k=state.k_CKD,
            v=state.v_CKV,
            o=state.out_SHV,
            d_o=dout_SHV,
            aux_ctx_tensors=[stats, rng_state],
            do_format="thd",
            dqkv_layout="thd_thd_thd",
            deterministic=is_deterministic(),
            **self._arguments(call, state.q_SHD),
        )
        return dq_SHD, dk_CKD, dv_CKV


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
