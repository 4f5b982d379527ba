"""Transformer Engine's own context parallelism on CPU tensors and gloo, as a second oracle.

The real Python of TE runs: its all-to-alls, its ring, its choice of blocks and its merging. Stood
in for are what only a GPU has: the attention kernel (flash-attn 4's two functions, computed by our
CPU kernel), streams, and the operators of TE's extension that pick or merge rows of a packed
batch. With gloo TE's ring hangs in its backward on isend and irecv, so rows travel by all-gather.

TE deals each sample in 2 * cp chunks: rank r holds chunks r and 2 * cp - 1 - r. Shapes: T rows of
a rank, N rows of the whole batch, cp ranks.
"""

import contextlib
import importlib
import inspect
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from megatron_nsp.runtime.kernels import (
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
)
from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel
from tests.dist import recorded_signatures as recorded


def chunks(bounds: list[int], count: int) -> list[list[range]]:
    """The rows of `count` equal chunks of every sample."""
    return [
        [
            range(start + i * (stop - start) // count, start + (i + 1) * (stop - start) // count)
            for i in range(count)
        ]
        for start, stop in itertools.pairwise(bounds)
    ]


def rows_of_rank(bounds: list[int], cp: int, rank: int) -> list[int]:
    """`[T]` the rows of the batch that a rank holds, in its order."""
    per_sample = chunks(bounds, 2 * cp)
    return [row for parts in per_sample for i in (rank, 2 * cp - 1 - rank) for row in parts[i]]


def _rank_order(cu_seqlens: Tensor, cp: int) -> Tensor:
    bounds = cu_seqlens.tolist()
    return torch.tensor([row for rank in range(cp) for row in rows_of_rank(bounds, cp, rank)])


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Rows of the first or second halves of all samples of a rank."""
    return torch.tensor([row for parts in chunks(cu_seqlens.tolist(), 2) for row in parts[half]])


class Extension:
    """The operators of `transformer_engine_torch` that the two paths call on packed batches."""

    @staticmethod
    def thd_sequence_order_to_cp_rank_order(x: Tensor, cu: Tensor, cp: int, _: int) -> Tensor:
        return x[_rank_order(cu, cp)]

    @staticmethod
    def thd_cp_rank_order_to_sequence_order(x: Tensor, cu: Tensor, cp: int, _: int) -> Tensor:
        ordered = torch.empty_like(x)
        ordered[_rank_order(cu, cp)] = x
        return ordered

    @staticmethod
    def thd_read_half_tensor(x: Tensor, cu: Tensor, half: int) -> Tensor:
        return x[_half(cu, half)].contiguous()

    @staticmethod
    def thd_read_second_half_lse(lse: Tensor, cu: Tensor, is_packed: bool, length: int) -> Tensor:
        assert is_packed and length == lse.shape[1] // 2
        return lse[:, _half(cu, 1)].contiguous()

    @staticmethod
    def thd_second_half_lse_correction(
        lse: Tensor, step_lse: Tensor, cu: Tensor, is_packed: bool
    ) -> None:
        assert is_packed
        rows = _half(cu, 1)
        lse[:, rows] = torch.logaddexp(lse[:, rows], step_lse)

    @staticmethod
    def thd_out_correction(
        out: Tensor,
        step_out: Tensor,
        old_lse: Tensor,
        lse: Tensor,
        step_lse: Tensor,
        cu: Tensor,
        is_second_half: bool,
        is_packed: bool,
    ) -> None:
        assert is_packed
        rows = _half(cu, 1) if is_second_half else torch.arange(out.shape[0])
        old, new = old_lse[:, rows].t().unsqueeze(2), lse[:, rows].t().unsqueeze(2)
        step = torch.exp(step_lse.t().unsqueeze(2) - new)
        out[rows] = out[rows] * torch.exp(old - new) + step_out.view(-1, *out.shape[1:]) * step

    @staticmethod
    def thd_grad_correction(
        grad: Tensor, step_grad: Tensor, cu: Tensor, first: str, second: str
    ) -> None:
        is_half = "none" in (first, second) or "zero" in (first, second)
        for half, action in enumerate((first, second)):
            rows = _half(cu, half)
            if action == "zero":
                grad[rows] = 0
            elif action != "none":
                step = step_grad if is_half else step_grad[rows]
                grad[rows] = step + grad[rows] if action == "add" else step


_KERNEL = CpuFlashKernel()


def _call(a: dict[str, Any]) -> VarlenCall:
    samples = SampleBounds(
        np.array(a["cu_seqlens_q"].tolist()), np.array(a["cu_seqlens_k"].tolist())
    )
    assert a["window_size_left"] in (None, -1), "no windows here"
    return VarlenCall(samples, AttentionMask(a["softmax_scale"], a["causal"]))


def flash_forward(*args: Any, **kwargs: Any) -> tuple:
    """flash-attn 4's forward on CPU tensors."""
    bound = recorded.FLASH_ATTN_4_FORWARD.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    return _KERNEL.forward(*(a[x].contiguous() for x in "qkv"), _call(a))


def flash_backward(*args: Any, **kwargs: Any) -> tuple:
    """flash-attn 4's backward on CPU tensors."""
    bound = recorded.FLASH_ATTN_4_BACKWARD.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    dout, *state = (a[name].contiguous() for name in ("dout", "q", "k", "v", "out"))
    return _KERNEL.backward(dout, AttentionState(*state, a["lse"]), _call(a))


def gathered_ring(
    rank: int,
    send: Tensor,
    send_to: int,
    received: Tensor,
    receive_from: int,
    group: Any,
    batch: bool,
) -> list:
    """What a step of the ring moves, by all-gather."""
    everyone = [torch.empty_like(send) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, send.contiguous(), group=group)
    received.copy_(everyone[receive_from])
    return []


@contextlib.contextmanager
def te_on_cpu() -> Iterator[Any]:
    """TE's module of context parallelism, able to run on CPU tensors."""
    from transformer_engine.pytorch.attention.dot_product_attention import (
        backends,
        context_parallel,
    )

    extension = mock.Mock(wraps=context_parallel.tex)
    for name, function in inspect.getmembers(Extension, inspect.isfunction):
        setattr(extension, name, function)
    stream, event = mock.MagicMock(), mock.MagicMock()
    patches = [
        mock.patch.object(context_parallel, "tex", extension),
        mock.patch.object(context_parallel, "flash_attn_p2p_communicate", gathered_ring),
        mock.patch.object(context_parallel, "get_device_compute_capability", return_value=(9, 0)),
        mock.patch.object(context_parallel.FP8GlobalStateManager, "get_fp8_recipe"),
        mock.patch.object(backends, "_flash_attn_fwd_v4", flash_forward),
        mock.patch.object(backends, "_flash_attn_bwd_v4", flash_backward),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "Event", return_value=event),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield context_parallel


class _Float32Too:
    """torch with float32 in place of float16, for a check of what flash-attn takes."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def te_module_on_cpu() -> Iterator[None]:
    """TE's DotProductAttention too: all of its Python between our call and its own rings runs.

    It believes that flash-attn 4 was chosen and that CPU tensors are on a GPU of capability 9.0.
    """
    from transformer_engine.pytorch.attention import dot_product_attention as package

    module = importlib.import_module(f"{package.__name__}.dot_product_attention")
    backends = importlib.import_module(f"{package.__name__}.backends")
    choice = (True, Version("4.0.0"), False, None, False, [True, False, False])
    patches = [
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "Stream", mock.MagicMock()),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
        mock.patch.object(module.dpa_utils, "get_attention_backend", return_value=choice),
        mock.patch.object(backends, "get_device_compute_capability", return_value=(9, 0)),
        mock.patch.object(backends, "torch", _Float32Too()),
    ]
    with te_on_cpu(), contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def te_attention(
    method: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, bounds: list[int], is_causal: bool
) -> list[Tensor]:
    """Output and gradients of this rank's rows, by TE's a2a or p2p over all ranks.

    Args:
        method: 'a2a' or 'p2p'.
        q: this rank's queries, `rows_of_rank` of the batch.
        k: its keys.
        v: its values.
        dout: its gradient of the output.
        bounds: where each sample of the whole batch starts, and the end.
        is_causal: the mask.
    """
    with te_on_cpu() as module:
        name = {"a2a": "AttnFuncWithCPAndQKVOA2A", "p2p": "AttnFuncWithCPAndKVP2P"}[method]
        function = getattr(module, name)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        longest = max(np.diff(bounds).tolist())
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        given = SimpleNamespace(
            is_training=True,
            q=leaves[0],
            k=leaves[1],
            v=leaves[2],
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            dropout_p=0.0,
            softmax_scale=q.shape[2] ** -0.5,
            qkv_format="thd",
            attn_mask_type="padding_causal" if is_causal else "padding",
            attn_bias_type="no_bias",
            deterministic=True,
            softcap=0.0,
            window_size=(-1, 0) if is_causal else (-1, -1),
            cp_group=dist.group.WORLD,
            cp_global_ranks=list(range(dist.get_world_size())),
            cp_stream=torch.cuda.current_stream(),
            use_flash_attn_4=True,
            softmax_type="vanilla",
        )
        names = list(inspect.signature(function.forward).parameters)[1:]
        switches = {"fp8", "pad_between_seqs", "use_fused_attention", "use_flash_attn_3"}
        switches |= {"return_max_logit", "fp8_output"}
        arguments = [getattr(given, each, False if each in switches else None) for each in names]
        out = function.apply(*arguments)
        out.backward(dout.view_as(out))
        return [out.detach().view_as(dout), *(x.grad for x in leaves)]
