"""The package flash-attn 2: its variable-length operators, which give and take the LSE.

One head dim for keys and values, at most 256. Gradients are written into tensors of ours.
"""

from typing import Any, override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionState, VarlenCall
from megatron_nsp.runtime.kernels.needs import Needs
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic


def _arguments(call: VarlenCall, device: torch.device) -> dict[str, Any]:
    left, right = call.window
    return {
        **call.keywords(device, "k"),
        "dropout_p": 0.0,
        "softmax_scale": call.mask.softmax_scale,
        "causal": call.mask.is_causal,
        "window_size_left": left,
        "window_size_right": right,
    }


class FlashAttn2Kernel(PaddedKernel):
    """flash-attn 2.7.3 and later, on CUDA tensors of 16-bit floats."""

    name = "flash-attn-2"
    needs = Needs("cuda", "flash_attn.flash_attn_interface", "flash-attn 2")

    def __init__(self) -> None:
        """Loads the package."""
        from flash_attn.flash_attn_interface import (
            _flash_attn_varlen_backward,
            _flash_attn_varlen_forward,
        )

        self._forward, self._backward = _flash_attn_varlen_forward, _flash_attn_varlen_backward

    @override
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        arguments = _arguments(call, q_SHD.device)
        out_SHV, lse_HS, _, _ = self._forward(q_SHD, k_CKD, v_CKV, **arguments)
        return out_SHV, lse_HS

    @override
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in state.tensors[:3])
        self._backward(
            dout_SHV,
            *state.tensors,
            dq=dq,
            dk=dk,
            dv=dv,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=is_deterministic(),
            **_arguments(call, dout_SHV.device),
        )
        return dq, dk, dv
