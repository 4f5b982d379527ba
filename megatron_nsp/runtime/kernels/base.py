"""The contract of an attention kernel: variable-length, out and LSE explicit in both directions.

Shapes: S query rows, C key rows (equal to S where every sample attends to itself whole), H query
heads, K key/value heads (H a multiple of K), D head dim of queries and keys, V that of values and
output.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.runtime.kernels.needs import Needs


@dataclass(frozen=True)
class AttentionMask:
    """What each query sees inside its own sample, and how scores are scaled.

    Attributes:
        softmax_scale: factor of the scores.
        is_causal: a token sees itself and what is before it; otherwise its whole sample.
        window_left: most tokens before itself that a token sees; None = all. Causal masks only.
    """

    softmax_scale: float
    is_causal: bool = True
    window_left: int | None = None

    def __post_init__(self) -> None:
        """Refuses windows that are not one-sided.

        Raises:
            ValueError: a window without a causal mask, or a negative one.
        """
        if self.window_left is not None and (not self.is_causal or self.window_left < 0):
            raise ValueError(
                f"a sliding window needs a causal mask and at least 0 tokens, got "
                f"{self.window_left} with is_causal={self.is_causal}"
            )


class SampleBounds:
    """Where the samples of a call start and stop, in the forms that kernels want.

    A causal mask aligns the ends: the last query of a sample sees its last key. So a sample's
    queries may be the tail of what its keys cover.

    Args:
        cu_seqlens: `[samples + 1]` where the queries of each sample start, and the end; no sample
            is empty.
        cu_seqlens_kv: `[samples + 1]` the same of its keys; without it that of its queries.
    """

    def __init__(self, cu_seqlens: IntArray, cu_seqlens_kv: IntArray | None = None) -> None:
        """Keeps the bounds; the forms below are made when first asked for."""
        self.bounds: list[int] = cu_seqlens.tolist()
        self.kv_bounds = self.bounds if cu_seqlens_kv is None else cu_seqlens_kv.tolist()
        assert len(self.bounds) == len(self.kv_bounds), f"{self.bounds} {self.kv_bounds}"
        for bounds in (self.bounds, self.kv_bounds):
            assert all(a < b for a, b in itertools.pairwise(bounds)), bounds
        self._on_device: dict[tuple[torch.device, bool], Tensor] = {}

    @property
    def is_square(self) -> bool:
        """Whether the queries of each sample are as many as its keys."""
        return self.bounds == self.kv_bounds

    @cached_property
    def slices(self) -> list[slice]:
        """The query rows of each sample."""
        return _slices(self.bounds)

    @cached_property
    def kv_slices(self) -> list[slice]:
        """The key rows of each sample."""
        return _slices(self.kv_bounds)

    @cached_property
    def max_length(self) -> int:
        """Queries of the sample with most, 0 without samples."""
        return max((rows.stop - rows.start for rows in self.slices), default=0)

    @cached_property
    def max_kv_length(self) -> int:
        """Keys of the sample with most, 0 without samples."""
        return max((rows.stop - rows.start for rows in self.kv_slices), default=0)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """`[samples + 1]` int32 bounds of the queries on `device`, copied there once."""
        return self._bounds_on(device, is_kv=False)

    def cu_seqlens_kv(self, device: torch.device) -> Tensor:
        """`[samples + 1]` int32 bounds of the keys; the same tensor where they are the same."""
        return self._bounds_on(device, is_kv=not self.is_square)

    def _bounds_on(self, device: torch.device, is_kv: bool) -> Tensor:
        key = (device, is_kv)
        if key not in self._on_device:
            bounds = self.kv_bounds if is_kv else self.bounds
            self._on_device[key] = torch.tensor(bounds, dtype=torch.int32, device=device)
        return self._on_device[key]


def _slices(bounds: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """A variable-length call of attention apart from its tensors, and what packages call its parts.

    Attributes:
        samples: where each sample starts and stops; every query sees at least one key.
        mask: mask and scale.
    """

    samples: SampleBounds
    mask: AttentionMask

    @property
    def window(self) -> tuple[int, int]:
        """Keys a query sees to its left and right, -1 = all, counted from where the ends align."""
        left = -1 if self.mask.window_left is None else self.mask.window_left
        return left, 0 if self.mask.is_causal else -1

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Bounds of queries and of keys, and the longest of each: the order of every package."""
        samples = self.samples
        starts = samples.cu_seqlens(device), samples.cu_seqlens_kv(device)
        return (*starts, samples.max_length, samples.max_kv_length)

    def keywords(self, device: torch.device, keys: str) -> dict[str, Any]:
        """The bounds as the keyword arguments of flash-attn and Transformer Engine.

        Args:
            device: where the package runs.
            keys: what it calls keys: 'k' or 'kv'.
        """
        names = ("cu_seqlens_q", f"cu_seqlens_{keys}", "max_seqlen_q", f"max_seqlen_{keys}")
        return dict(zip(names, self.bounds(device), strict=True))


@dataclass(frozen=True, eq=False)
class AttentionState:
    """What backward needs of a forward.

    `out_SHV` and `lse_HS` need not be what `forward` gave for these keys alone: with those of all
    keys a query sees (and of an attention sink) the gradients are this block's part.
    """

    q_SHD: Tensor
    k_CKD: Tensor
    v_CKV: Tensor
    out_SHV: Tensor
    lse_HS: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All of them, in order."""
        return self.q_SHD, self.k_CKD, self.v_CKV, self.out_SHV, self.lse_HS


class AttentionKernel(Protocol):
    """Attention of the queries of every sample to its keys: all there is to say of a kernel.

    Making one loads the package it needs; its file can be imported without.

    Attributes:
        name: what --nsp-kernel calls it.
        needs: what it runs on.
        takes_32_bits: whether its inputs may be of more than 16 bits.
        returns_lse: False where `forward` gives an LSE of no rows and `backward` computes the
            output anew: its nodes cannot be saved, merged over blocks of keys, or given sinks.
        deterministic_is_heavy_on: major capabilities of GPUs on which a deterministic backward of
            long samples wants more memory than there is; 'auto' passes it over there.
    """

    name: str
    needs: Needs = Needs()
    takes_32_bits: bool = False
    returns_lse: bool = True
    deterministic_is_heavy_on: tuple[int, ...] = ()

    def forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        """Returns `out_SHV` and `lse_HS`, the natural log of each row's sum of exponentials.

        Args:
            q_SHD: contiguous queries.
            k_CKD: contiguous keys.
            v_CKV: contiguous values.
            call: samples and mask.

        The LSE is float32 (float64 for float64 inputs).
        """
        ...

    def backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `dq_SHD, dk_CKD, dv_CKV`."""
        ...


class NativeAttention(Protocol):
    """Causal attention of a node whose ranks each hold some rows of every sample.

    F are the rows of a rank where all chunks are filled up (`split.py`).

    Attributes:
        needs: what it runs on.
    """

    needs: Needs

    def attend(
        self,
        q_FHD: Tensor,
        k_FKD: Tensor,
        v_FKV: Tensor,
        call: VarlenCall,
        group: dist.ProcessGroup,
        method: str,
    ) -> Tensor:
        """Returns `out_FHV`, differentiable; a collective call for the ranks of the group.

        Args:
            q_FHD: queries of this rank's rows.
            k_FKD: their keys.
            v_FKV: their values.
            call: the whole samples, filled up, and the mask.
            group: the ranks that hold the samples.
            method: 'p2p' or 'a2a'.
        """
        ...


def require_lse(kernel: AttentionKernel, purpose: str) -> None:
    """Refuses kernels without LSE for what cannot be done without.

    Raises:
        ValueError: the kernel gives none.
    """
    if not kernel.returns_lse:
        raise ValueError(f"--nsp-kernel {kernel.name} gives no LSE, which {purpose} needs")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def hidden_keys(
    num_queries: int, num_keys: int, mask: AttentionMask, device: torch.device
) -> Tensor | None:
    """`[queries, keys]` bool of the keys of one sample that a query does not see; None = none."""
    if not mask.is_causal:
        return None
    last_seen = torch.arange(num_queries, device=device).unsqueeze(1) + (num_keys - num_queries)
    key = torch.arange(num_keys, device=device)
    hidden = key > last_seen
    if mask.window_left is not None:
        hidden |= key < last_seen - mask.window_left
    return hidden


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


def check_heads(q_SHD: Tensor, k_CKD: Tensor) -> None:
    """Refuses head counts that do not share keys evenly; torch's CPU kernel would accept them.

    Raises:
        ValueError: the query heads are no multiple of the key/value heads.
    """
    if q_SHD.shape[1] % k_CKD.shape[1]:
        raise ValueError(
            f"{q_SHD.shape[1]} query heads are no multiple of {k_CKD.shape[1]} key/value heads"
        )


def pad_head_dim(x_SHD: Tensor, head_dim: int) -> Tensor:
    """`x_SHD` with zeros up to `head_dim`, for kernels with one head dim; itself if it has it.

    Zeros in queries and keys change no score; zeros in values give zeros in the output.
    """
    missing = head_dim - x_SHD.shape[2]
    return x_SHD if missing == 0 else torch.nn.functional.pad(x_SHD, (0, missing))
