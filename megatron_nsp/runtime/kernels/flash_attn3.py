"""flash-attn 3, for GPUs of compute capability 9.0; its module is `flash_attn_interface`.

Two interfaces are about. The first (flash-attn 2.8.3's folder hopper) takes the window as a pair
and has no defaults for what it is seldom called with; the second (3.0.0) is a torch operator that
takes the window as two numbers and calls the mask of backward `is_causal`.
"""

import inspect
from typing import Any, override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionState, VarlenCall
from megatron_nsp.runtime.kernels.needs import Needs
from megatron_nsp.runtime.kernels.padded import PaddedKernel, is_deterministic, round_up

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
    needs = Needs("cuda", "flash_attn_interface", "flash-attn 3", least=(9, 0), last=9)

    def __init__(self) -> None:
        """Loads the package and finds out which interface it has."""
        from flash_attn_interface import _flash_attn_backward, _flash_attn_forward

        self._forward, self._backward = _flash_attn_forward, _flash_attn_backward
        # A torch operator has no signature of its own.
        self.takes_pair = "window_size" in inspect.signature(self._forward).parameters

    @override
    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        key_dim, value_dim = round_up(head_dim), round_up(value_dim)
        if 128 < key_dim <= 192 and 96 < value_dim <= 128:  # one of its own: as it is
            return key_dim, value_dim
        return (max(key_dim, value_dim),) * 2

    def _arguments(self, call: VarlenCall, device: torch.device) -> dict[str, Any]:
        left, right = call.window
        arguments = call.keywords(device, "k") | {"softmax_scale": call.mask.softmax_scale}
        if self.takes_pair:
            return arguments | {"window_size": (left, right)}
        return arguments | {"window_size_left": left, "window_size_right": right}

    @override
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        arguments = self._arguments(call, q_SHD.device)
        arguments |= dict.fromkeys(_UNUSED) if self.takes_pair else {}
        causal = call.mask.is_causal
        out_SHV, lse_HS, *_ = self._forward(q_SHD, k_CKD, v_CKV, causal=causal, **arguments)
        return out_SHV, lse_HS

    @override
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim = state.q_SHD.shape[2]
        if is_deterministic() and head_dim >= LEAST_NONDETERMINISTIC_DIM:
            raise ValueError(
                f"--nsp-kernel flash-attn-3 is deterministic below head dim "
                f"{LEAST_NONDETERMINISTIC_DIM} only, got {head_dim}"
            )
        dq, dk, dv = (torch.empty_like(x) for x in state.tensors[:3])
        causal = "causal" if self.takes_pair else "is_causal"
        self._backward(
            dout_SHV,
            *state.tensors,
            sequed_q=None,
            sequed_k=None,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=is_deterministic(),
            **{causal: call.mask.is_causal},
            **self._arguments(call, dout_SHV.device),
        )
        return dq, dk, dv
