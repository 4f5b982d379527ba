"""The contract of an attention kernel: variable-length, out and LSE explicit in both directions.

Shapes: S tokens of the stream, H query heads, K key/value heads (H a multiple of K), D head dim.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_nsp.plan import IntArray


@dataclass(frozen=True)
class AttentionMask:
    """What each query sees inside its own sample, and how scores are scaled.

    Attributes:
        softmax_scale: factor of the scores.
        is_causal: a token sees itself and what is before it; otherwise its whole sample.
    """

    softmax_scale: float
    is_causal: bool = True


class SampleBounds:
    """Where the samples of a stream start and stop, in the forms that kernels want.

    Args:
        cu_seqlens: `[samples + 1]` where each sample starts in the stream, and the end; no sample
            is empty.
    """

    def __init__(self, cu_seqlens: IntArray) -> None:
        """Keeps the bounds; the forms below are made when first asked for."""
        self.bounds: list[int] = cu_seqlens.tolist()
        assert all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False)), self.bounds
        self._cu_seqlens_on: dict[torch.device, Tensor] = {}

    @cached_property
    def slices(self) -> list[slice]:
        """The rows of each sample."""
        return [slice(a, b) for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sample."""
        return max(rows.stop - rows.start for rows in self.slices)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """`[samples + 1]` int32 on `device`, copied there once."""
        if device not in self._cu_seqlens_on:
            self._cu_seqlens_on[device] = torch.tensor(
                self.bounds, dtype=torch.int32, device=device
            )
        return self._cu_seqlens_on[device]


class AttentionKernel(Protocol):
    """Attention of every sample of a stream to itself."""

    name: str

    def forward(
        self,
        q_SHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor]:
        """Returns `out_SHD` and `lse_HS`, the natural log of each row's sum of exponentials.

        Args:
            q_SHD: contiguous queries.
            k_SKD: contiguous keys.
            v_SKD: contiguous values.
            samples: where each sample starts and stops.
            mask: mask and scale.

        The LSE is float32 (float64 for float64 inputs).
        """
        ...

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
        """Returns `dq_SHD, dk_SKD, dv_SKD` from what `forward` took and gave."""
        ...


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_contiguous(*tensors: Tensor) -> None:
    """Refuses strided tensors: kernels get the layout they were promised.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    for place, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(
                f"kernel input {place} of shape {tuple(tensor.shape)} has strides "
                f"{tensor.stride()}, not contiguous"
            )


def check_heads(q_SHD: Tensor, k_SKD: Tensor) -> None:
    """Refuses head counts that do not share keys evenly; torch's CPU kernel would accept them.

    Raises:
        ValueError: the query heads are no multiple of the key/value heads.
    """
    if q_SHD.shape[1] % k_SKD.shape[1]:
        raise ValueError(
            f"{q_SHD.shape[1]} query heads are no multiple of {k_SKD.shape[1]} key/value heads"
        )
