"""What kernels of packages share: checks, and padding of head dims."""

from abc import abstractmethod
from typing import override

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import (
    AttentionKernel,
    AttentionState,
    VarlenCall,
    check_contiguous,
    check_heads,
    pad_head_dim,
)

HEAD_DIM_MULTIPLE = 8
"""Flash kernels for GPUs read rows of 16 bytes."""


def round_up(head_dim: int) -> int:
    """The head dim padded to what kernels for GPUs take."""
    return -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


class PaddedKernel(AttentionKernel):
    """A kernel whose package takes certain head dims only.

    A subclass says which, in `head_dims`, and runs the package in `run_forward` and `run_backward`
    on tensors of these dims.
    """

    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Head dims of keys and of values that the package is called with; here the same."""
        return (round_up(max(head_dim, value_dim)),) * 2

    @abstractmethod
    def run_forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of padded inputs."""

    @abstractmethod
    def run_backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of padded inputs."""

    @override
    def forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        check_heads(q_SHD, k_CKD)
        check_contiguous(q_SHD, k_CKD, v_CKV)
        key_dim, value_dim = self.head_dims(q_SHD.shape[2], v_CKV.shape[2])
        out_SHV, lse_HS = self.run_forward(
            pad_head_dim(q_SHD, key_dim),
            pad_head_dim(k_CKD, key_dim),
            pad_head_dim(v_CKV, value_dim),
            call,
        )
        return out_SHV[..., : v_CKV.shape[2]].contiguous(), lse_HS

    @override
    def backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_SHD, k_CKD, v_CKV, out_SHV, lse_HS = state.tensors
        check_contiguous(dout_SHV, q_SHD, k_CKD, v_CKV, out_SHV)
        key_dim, value_dim = self.head_dims(q_SHD.shape[2], v_CKV.shape[2])
        padded = AttentionState(
            pad_head_dim(q_SHD, key_dim),
            pad_head_dim(k_CKD, key_dim),
            pad_head_dim(v_CKV, value_dim),
            pad_head_dim(out_SHV, value_dim),
            lse_HS,
        )
        dq, dk, dv = self.run_backward(pad_head_dim(dout_SHV, value_dim), padded, call)
        head_dim = q_SHD.shape[2]
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., : v_CKV.shape[2]]


def is_deterministic() -> bool:
    """Whether torch (and with it Megatron's --deterministic-mode) asks for the same bits twice."""
    return torch.are_deterministic_algorithms_enabled()
