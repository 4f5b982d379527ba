"""Transformer Engine's DotProductAttention on the heads that a rank holds, no CP group inside.

The module chooses among TE's own kernels by its own rules, and it keeps its LSE to itself. So its
output cannot be saved for a backward of ours: backward runs the module's forward again, with grad.
"""

from typing import Any, override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import AttentionState, VarlenCall
from megatron_nsp.runtime.kernels.padded import PaddedKernel, round_up
from megatron_nsp.runtime.kernels.te_attention import TE, ModuleShape, te_arguments


class TeModuleKernel(PaddedKernel):
    """TE's attention module on CUDA tensors of 16-bit floats; `lse_HS` is `[H, 0]`."""

    name = "te-module"
    needs = TE
    returns_lse = False

    def __init__(self) -> None:
        """Loads the package.

        Modules are made as shapes come; without parameters they hold nothing but settings.
        """
        from transformer_engine.pytorch import DotProductAttention

        self._module_class: Any = DotProductAttention
        self.modules: dict[ModuleShape, Any] = {}

    @override
    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        return round_up(head_dim), round_up(value_dim)

    def _attend(self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall) -> Tensor:
        shape = ModuleShape.of(q_SHD, v_CKV, call)
        if shape not in self.modules:
            self.modules[shape] = shape.make(self._module_class)
        out = self.modules[shape](
            *(from_the_start(x) for x in (q_SHD, k_CKD, v_CKV)),
            pad_between_seqs=False,
            **te_arguments(call, q_SHD.device),
        )
        attended: Tensor = out.view(-1, shape.num_heads, shape.value_dim)
        return attended

    @override
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out_SHV = self._attend(q_SHD, k_CKD, v_CKV, call)
        return out_SHV, q_SHD.new_empty(q_SHD.shape[1], 0, dtype=torch.float32)

    @override
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in state.tensors[:3])
        with torch.enable_grad():
            again_SHV = self._attend(q, k, v, call)
            dq_SHD, dk_CKD, dv_CKV = torch.autograd.grad(again_SHV, (q, k, v), dout_SHV)
        return dq_SHD, dk_CKD, dv_CKV


def from_the_start(x_SHD: Tensor) -> Tensor:
    """`x_SHD` at the start of its storage, copied if it is not.

    TE guesses the layout of q, k and v from where they lie in memory, and refuses the rows of a
    node in the middle of a rank's buffer.
    """
    return x_SHD if x_SHD.storage_offset() == 0 else x_SHD.clone()
