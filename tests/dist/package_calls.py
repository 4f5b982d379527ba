"""What stand-ins for attention packages share: calls bound to a signature, and what they mean."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_nsp.runtime.kernels import (
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
)
from megatron_nsp.runtime.kernels.reference import ReferenceKernel

DEFINITION = ReferenceKernel()
Arguments = dict[str, Any]


class Package:
    """Binds the calls of one package and keeps their arguments."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []

    def function(
        self, signature: inspect.Signature, compute: Callable[[Arguments], Any]
    ) -> Callable:
        """A function of this signature."""

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls.append(dict(bound.arguments))
            return compute(dict(bound.arguments))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call


def bounds_of(a: Arguments, kv: str = "k") -> SampleBounds:
    """The samples of a call, from bounds that must be int32 and lengths that must be right."""
    cu_q, cu_k = a["cu_seqlens_q"], a[f"cu_seqlens_{kv}"]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    samples = SampleBounds(np.array(cu_q.tolist()), np.array(cu_k.tolist()))
    assert (a["max_seqlen_q"], a[f"max_seqlen_{kv}"]) == (
        samples.max_length,
        samples.max_kv_length,
    )
    assert samples.bounds[-1] == a["q"].shape[0] and samples.kv_bounds[-1] == a["k"].shape[0]
    return samples


def mask_of(scale: float, is_causal: bool, left: int, right: int) -> AttentionMask:
    """The mask of a window given as two numbers, -1 = all; causal is the same as nothing to the
    right.
    """
    assert isinstance(scale, float)
    is_causal = is_causal or right == 0
    assert is_causal or (left, right) == (-1, -1)
    return AttentionMask(scale, is_causal, None if left < 0 else left)


def check_dims(a: Arguments, may_differ: Callable[[int, int], bool] = lambda d, v: False) -> None:
    """Head dims are multiples of 8, at most 256, and equal unless the package says otherwise."""
    head_dim, value_dim = a["q"].shape[2], a["v"].shape[2]
    assert head_dim % 8 == value_dim % 8 == 0 and max(head_dim, value_dim) <= 256
    assert a["k"].shape[2] == head_dim
    assert head_dim == value_dim or may_differ(head_dim, value_dim), (head_dim, value_dim)


def tensors(a: Arguments, *names: str) -> list[Tensor]:
    found = [a[name] for name in names]
    assert all(x.is_contiguous() for x in found)
    return found


def output(a: Arguments, call: VarlenCall, names: str = "q k v") -> tuple[Tensor, Tensor]:
    """Output and LSE by the definition, of the tensors with these names."""
    return DEFINITION.forward(*tensors(a, *names.split()), call)


def gradients(a: Arguments, call: VarlenCall, names: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the definition, of dout, q, k, v, out and LSE with these names."""
    dout, *state = tensors(a, *names.split())
    return DEFINITION.backward(dout, AttentionState(*state), call)
