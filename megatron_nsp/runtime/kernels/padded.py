"""What kernels of packages share: checks, padding of head dims, and the window as two numbers."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import (
    AttentionMask,
    SampleBounds,
    check_contiguous,
    check_heads,
    pad_head_dim,
)

HEAD_DIM_MULTIPLE = 8
"""Flash kernels for GPUs read rows of 16 bytes."""


def round_up(head_dim: int) -> int:
    """The head dim padded to what kernels for GPUs take."""
    return -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def window(mask: AttentionMask) -> tuple[int, int]:
    """Keys a query sees to its left and right, -1 = all, counted from where the ends align."""
    left = -1 if mask.window_left is None else mask.window_left
    return left, 0 if mask.is_causal else -1


class PaddedKernel(ABC):
    """A kernel whose package takes certain head dims only.

    A subclass says which, in `head_dims`, and runs the package in `run_forward` and `run_backward`
    on tensors of these dims.
    """

    name: str
    returns_lse = True

    def head_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Head dims of keys and of values that the package is called with; here the same."""
        return (round_up(max(head_dim, value_dim)),) * 2

    @abstractmethod
    def run_forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of padded inputs."""

    @abstractmethod
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
        """Gradients of padded inputs."""

    def forward(
        self,
        q_SHD: Tensor,
        k_CKD: Tensor,
        v_CKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        check_heads(q_SHD, k_CKD)
        check_contiguous(q_SHD, k_CKD, v_CKV)
        key_dim, value_dim = self.head_dims(q_SHD.shape[2], v_CKV.shape[2])
        out_SHV, lse_HS = self.run_forward(
            pad_head_dim(q_SHD, key_dim),
            pad_head_dim(k_CKD, key_dim),
            pad_head_dim(v_CKV, value_dim),
            samples,
            mask,
        )
        return out_SHV[..., : v_CKV.shape[2]].contiguous(), lse_HS

    def backward(
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
        """See `AttentionKernel.backward`."""
        check_contiguous(dout_SHV, q_SHD, k_CKD, v_CKV, out_SHV)
        key_dim, value_dim = self.head_dims(q_SHD.shape[2], v_CKV.shape[2])
        dq_SHD, dk_CKD, dv_CKV = self.run_backward(
            pad_head_dim(dout_SHV, value_dim),
            pad_head_dim(q_SHD, key_dim),
            pad_head_dim(k_CKD, key_dim),
            pad_head_dim(v_CKV, value_dim),
            pad_head_dim(out_SHV, value_dim),
            lse_HS,
            samples,
            mask,
        )
        head_dim = q_SHD.shape[2]
        return dq_SHD[..., :head_dim], dk_CKD[..., :head_dim], dv_CKV[..., : v_CKV.shape[2]]


def is_deterministic() -> bool:
    """Whether torch (and with it Megatron's --deterministic-mode) asks for the same bits twice."""
    return torch.are_deterministic_algorithms_enabled()
