"""A stand-in for Transformer Engine's context parallelism, on gloo: it gathers the rows of all
ranks, attends by the definition to the whole samples, and gives each rank its rows.

It holds its calls to what TE wants: a group that is set once and never again, bounds and longest
length of the whole samples, equal chunks dealt by TE's rule, and nothing else in flight.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.runtime.kernels import SampleBounds, VarlenCall
from tests.dist import recorded_signatures as recorded
from tests.dist.package_calls import Arguments, Package, bounds_of, check_dims
from tests.dist.te_packages import plain_attention, te_mask


class _Gather(torch.autograd.Function):
    """`[cp * F, ...]` the rows of all ranks, in rank order; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, check: Callable) -> Tensor:
        check()
        ctx.group, ctx.check, ctx.rows = group, check, x.shape[0]
        everyone = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(everyone, x.contiguous(), group=group)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.check()
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.split(ctx.rows)[ctx.group.rank()], None, None


def rank_order(samples: SampleBounds, cp: int) -> Tensor:
    """Rows of the whole samples in the order in which ranks hold them."""
    rows: list[int] = []
    for rank in range(cp):
        for start, stop in zip(samples.bounds, samples.bounds[1:], strict=False):
            chunk, rest = divmod(stop - start, 2 * cp)
            assert rest == 0, f"a sample of {stop - start} rows for {cp=}"
            for i in (rank, 2 * cp - 1 - rank):
                rows += range(start + i * chunk, start + (i + 1) * chunk)
    return torch.tensor(rows)


def te_cp(package: Package, check: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """A DotProductAttention with context parallelism; `check` is called when it communicates."""

    class DotProductAttention:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = recorded.TE_MODULE.bind(*args, **kwargs)
            bound.apply_defaults()
            self.settings = bound.arguments
            assert self.settings["attention_dropout"] == 0.0 and self.settings["tp_size"] == 1
            self.group: dist.ProcessGroup | None = None

        def set_context_parallel_group(self, *args: Any, **kwargs: Any) -> None:
            bound = recorded.TE_MODULE_SET_GROUP.bind(*args, **kwargs)
            bound.apply_defaults()
            a = bound.arguments
            assert self.group is None, "the group of a module is changed"
            assert a["cp_global_ranks"] == dist.get_process_group_ranks(a["cp_group"])
            assert a["cp_stream"] is not None and a["cp_comm_type"] in ("p2p", "a2a")
            assert a["load_balancing_strategy"] == "DUAL_CHUNK_SWAP"
            self.group, self.method = a["cp_group"], a["cp_comm_type"]

        def attend(self, a: Arguments) -> Tensor:
            q, k, v = (a[f"{name}_layer"] for name in ("query", "key", "value"))
            assert self.group is not None
            cp, settings = self.group.size(), self.settings
            assert q.shape[1:] == (settings["num_attention_heads"], settings["kv_channels"][0])
            assert v.shape[1:] == (settings["num_gqa_groups"], settings["kv_channels"][1])
            assert q.shape[0] == k.shape[0] == v.shape[0]
            assert self.method == "p2p" or (q.shape[1] % cp == 0 and k.shape[1] % cp == 0)
            assert self.method == "a2a" or a["window_size"] == (-1, 0)
            assert settings["qkv_format"] == "thd" and a["pad_between_seqs"] is False
            assert all(x.storage_offset() == 0 for x in (q, k, v)), "layout would not be known"
            assert a["cu_seqlens_q_padded"] is a["cu_seqlens_q"]
            assert a["cu_seqlens_kv_padded"] is a["cu_seqlens_kv"]
            check_dims({"q": q, "k": k, "v": v}, lambda d, v: True)
            q, k, v = (_Gather.apply(x, self.group, check) for x in (q, k, v))
            samples = bounds_of({**a, "q": q, "k": k}, "kv")
            mask = te_mask(a, settings["softmax_scale"], samples)
            assert mask.is_causal and samples.is_square
            order = rank_order(samples, cp)
            place = torch.argsort(order)
            out = plain_attention(q[place], k[place], v[place], VarlenCall(samples, mask))
            return out[order].chunk(cp)[self.group.rank()].flatten(1)

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            given = package.function(recorded.TE_MODULE_FORWARD, self.attend)(*args, **kwargs)
            package.calls[-1]["module"] = self
            return given

    return {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"DotProductAttention": DotProductAttention},
    }
