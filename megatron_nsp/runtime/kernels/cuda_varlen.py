"""torch's own variable-length flash attention on CUDA; needs no package beside torch.

A causal mask is the window (-1, 0): everything before a token, nothing after it, with the last
query at the last key. With that window torch always takes its flash kernel, whose LSE is the
float32 `[H, S]` that the contract asks for.
"""

import importlib
from typing import override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionState, VarlenCall
from megatron_nsp.runtime.kernels.needs import Needs
from megatron_nsp.runtime.kernels.padded import PaddedKernel


class CudaVarlenKernel(PaddedKernel):
    """Flash attention on CUDA tensors of 16-bit floats."""

    name = "cuda-varlen"
    needs = Needs("cuda")

    def __init__(self) -> None:
        """Has torch register its operators."""
        importlib.import_module("torch.nn.attention.varlen")

    @override
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        out_SHV, lse_HS, _ = torch.ops.torch_attn._varlen_attn(
            q_SHD,
            k_CKD,
            v_CKV,
            *call.bounds(q_SHD.device),
            call.mask.is_causal,
            scale=call.mask.softmax_scale,
            window_size=list(call.window),
            enable_gqa=q_SHD.shape[1] != k_CKD.shape[1],
        )
        return out_SHV, lse_HS

    @override
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The operator takes the dropout state of forward; without dropout it is never read.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=dout_SHV.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
            dout_SHV,
            *state.tensors,
            *call.bounds(dout_SHV.device),
            call.mask.is_causal,
            rng_state,
            scale=call.mask.softmax_scale,
            window_size=list(call.window),
        )
        return grads
