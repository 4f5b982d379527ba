"""torch's CPU flash attention, one call a sample: it has no variable-length form.

The private operator is used because the public one does not return the LSE. Its traps: a sequence
of no tokens kills the process, head counts go unchecked, and `is_causal` aligns top-left, which is
right here because queries and keys of a sample have the same length.
"""

import torch
from torch import Tensor

from megatron_nsp.kernels.base import (
    AttentionMask,
    SampleBounds,
    check_contiguous,
    check_heads,
    lse_dtype,
)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x_SHD: Tensor) -> Tensor:
    return x_SHD.transpose(0, 1).unsqueeze(0)  # [1, H, S, D], a view


class CpuFlashKernel:
    """Flash attention on CPU tensors of any float dtype."""

    name = "cpu-flash"

    def forward(
        self,
        q_SHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        check_heads(q_SHD, k_SKD)
        check_contiguous(q_SHD, k_SKD, v_SKD)
        out_SHD = torch.empty_like(q_SHD)
        lse_HS = q_SHD.new_empty(q_SHD.shape[1], q_SHD.shape[0], dtype=lse_dtype(q_SHD.dtype))
        for rows in samples.slices:
            out, lse = _forward(
                _heads_first(q_SHD[rows]),
                _heads_first(k_SKD[rows]),
                _heads_first(v_SKD[rows]),
                0.0,
                mask.is_causal,
                scale=mask.softmax_scale,
            )
            out_SHD[rows] = out[0].transpose(0, 1)
            lse_HS[:, rows] = lse[0]
        return out_SHD, lse_HS

    def backward(
        self,
        dout_SHD: Tensor,
        q_SHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_SHD: Tensor,
        lse_HS: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        check_contiguous(dout_SHD, q_SHD, k_SKD, v_SKD, out_SHD)
        grads = torch.empty_like(q_SHD), torch.empty_like(k_SKD), torch.empty_like(v_SKD)
        for rows in samples.slices:
            parts = _backward(
                *(_heads_first(x[rows]) for x in (dout_SHD, q_SHD, k_SKD, v_SKD, out_SHD)),
                lse_HS[:, rows].unsqueeze(0),
                0.0,
                mask.is_causal,
                scale=mask.softmax_scale,
            )
            for grad, part in zip(grads, parts, strict=True):
                grad[rows] = part[0].transpose(0, 1)
        return grads
