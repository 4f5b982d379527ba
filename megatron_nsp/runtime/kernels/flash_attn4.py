"""flash-attn 4, whose kernels are compiled as they are first called; GPUs from capability 9.0 on.

Unlike its elders it takes out before dout in backward and returns the gradients, and a side of the
window without a limit is None.
"""

from typing import Any, override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionState, VarlenCall
from megatron_nsp.runtime.kernels.needs import Needs
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic, round_up

WIDE_KEYS = (192, 128)
"""Head dims of keys and values that differ and that every GPU's kernel takes."""


def _arguments(call: VarlenCall, device: torch.device) -> dict[str, Any]:
    return {
        **call.keywords(device, "k"),
        "softmax_scale": call.mask.softmax_scale,
        "causal": call.mask.is_causal,
        "window_size_left": call.mask.window_left,
        "window_size_right": None,
    }


class FlashAttn4Kernel(PaddedKernel):
    """flash-attn 4 on CUDA tensors of 16-bit floats."""

    name = "flash-attn-4"
    needs = Needs("cuda", "flash_attn.cute", "flash-attn-4", least=(9, 0))

    def __init__(self) -> None:
        """Loads the package."""
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        self._forward, self._backward = _flash_attn_fwd, _flash_attn_bwd

    @override
    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        dims = round_up(head_dim), round_up(value_dim)
        if max(dims) <= 128:
            return (max(dims),) * 2
        # Above 128 there are 192 with 128, and 256.
        if dims[0] <= WIDE_KEYS[0] and dims[1] <= WIDE_KEYS[1]:
            return WIDE_KEYS
        return (max(256, *dims),) * 2

    @override
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        arguments = _arguments(call, q_SHD.device)
        out_SHV, lse_HS, *_ = self._forward(q_SHD, k_CKD, v_CKV, return_lse=True, **arguments)
        return out_SHV, lse_HS

    @override
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_SHD, k_CKD, v_CKV, out_SHV, lse_HS = state.tensors
        dq_SHD, dk_CKD, dv_CKV, *_ = self._backward(
            q_SHD,
            k_CKD,
            v_CKV,
            out_SHV,
            dout_SHV,
            lse_HS,
            deterministic=is_deterministic(),
            **_arguments(call, q_SHD.device),
        )
        return dq_SHD, dk_CKD, dv_CKV
