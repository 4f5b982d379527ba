"""Errors of a kernel in 16 bits against the definition in float64, on the same inputs."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_nsp.runtime.backends.ulysses import join_heads, split_heads
from megatron_nsp.runtime.kernels import (
    AttentionKernel,
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
)
from megatron_nsp.runtime.kernels.reference import ReferenceKernel
from megatron_nsp.testing.oracle import relative_errors

NAMES = ("out", "dq", "dk", "dv")


def kernel_errors(
    kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall
) -> dict[str, float]:
    """Relative errors of output and gradients, and the largest error of the LSE if it gives one."""
    (out, lse), grads = _attention(kernel, (dout, q, k, v), call)
    doubles = (x.double() for x in (dout, q, k, v))
    (exact_out, exact_lse), exact_grads = _attention(ReferenceKernel(), doubles, call)
    errors = _named_errors((out, *grads), (exact_out, *exact_grads))
    if kernel.returns_lse:
        errors["lse"] = float((lse.double() - exact_lse).abs().max())
    return errors


def errors_by_degree(
    kernel: AttentionKernel, device: torch.device, tokens: int, degrees: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Relative errors of head-split attention in bfloat16, by heads and degree.

    The ranks of a node are played one after another: each attends with the heads that Ulysses
    would give it, and their results are joined as Ulysses joins them.

    Args:
        kernel: the kernel.
        device: where it runs.
        tokens: length of the one sample, 8 query heads, 8 or 2 key/value heads of 64.
        degrees: degrees that divide 8.
    """
    table: dict[str, dict[str, float]] = {}
    call = VarlenCall(SampleBounds(np.array([0, tokens])), AttentionMask(0.125))
    for num_kv_heads in (8, 2):
        torch.manual_seed(0)
        dout, q, k, v = (
            torch.randn(tokens, heads, 64, device=device).bfloat16()
            for heads in (8, 8, num_kv_heads, num_kv_heads)
        )
        exact = _exact_attention(dout, q, k, v, call)
        for degree in degrees:
            per_rank = []
            for heads in zip(*(split_heads(x, degree) for x in (dout, q, k, v)), strict=True):
                own = (x.contiguous() for x in heads)
                (out, _), grads = _attention(kernel, own, call)
                per_rank.append((out, *grads))
            joined = [
                join_heads(torch.stack(parts), one.shape[1])
                for parts, one in zip(zip(*per_rank, strict=True), exact, strict=True)
            ]
            table[f"{num_kv_heads} key/value heads, degree {degree}"] = _named_errors(joined, exact)
    return table


def _named_errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    return relative_errors(
        dict(zip(NAMES, found, strict=True)), dict(zip(NAMES, exact, strict=True))
    )


def _attention(
    kernel: AttentionKernel, tensors: Iterable[Tensor], call: VarlenCall
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Output and LSE, and the gradients of q, k and v, of `tensors` dout, q, k and v."""
    dout, q, k, v = tensors
    out, lse = kernel.forward(q, k, v, call)
    return (out, lse), kernel.backward(dout, AttentionState(q, k, v, out, lse), call)


def _exact_attention(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall
) -> list[Tensor]:
    """Output and gradients, one key/value head after another for the sake of memory."""
    kernel, parts = ReferenceKernel(), []
    for heads in zip(*(split_heads(x, k.shape[1]) for x in (dout, q, k, v)), strict=True):
        own = (x.double().contiguous() for x in heads)
        (out, _), grads = _attention(kernel, own, call)
        parts.append((out, *grads))
    return [torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)]
