"""Moves tensors between the static input layout and the plan layout, in one all-to-all each way.

    from megatron_nsp.runtime.reshard import ReshardMap, to_plan, to_static

    reshard_map = ReshardMap.build(plan, micro_batch, rank, static_degree=2)
    x_plan = to_plan(x_static, reshard_map, group)  # tokens, labels, embeddings, ...
    losses_static = to_static(losses_plan, reshard_map, group)

A tensor has one row a token and any further dimensions; several tensors stacked in one travel in
one exchange. Each function is the backward of the other, so gradients take one all-to-all too.
Filler rows of the plan layout are zeros on the way in and dropped on the way out. The layouts are
drawn in `input_layout`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.static_layout import ExchangedRows, ReshardMap

__all__ = ["ReshardMap", "to_plan", "to_static"]


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sender: ExchangedRows,
        receiver: ExchangedRows,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.reverse = (receiver, sender, group)
        send = x.index_select(0, torch.from_numpy(sender.rows).to(x.device))
        received = x.new_empty((len(receiver.rows), *x.shape[1:]))
        dist.all_to_all_single(
            received, send, list(receiver.counts), list(sender.counts), group=group
        )
        out = x.new_zeros((receiver.buffer_tokens, *x.shape[1:]))
        return out.index_copy_(0, torch.from_numpy(receiver.rows).to(x.device), received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_Reshard.apply(grad, *ctx.reverse), None, None, None)


def _check(
    x: Tensor, sender: ExchangedRows, reshard_map: ReshardMap, group: dist.ProcessGroup, name: str
) -> None:
    """No backend of torch.distributed notices a map of other ranks or another micro-batch."""
    if x.shape[0] != sender.buffer_tokens:
        raise ValueError(
            f"{name} got {x.shape[0]} rows, the map gives rank {reshard_map.rank} "
            f"{sender.buffer_tokens}"
        )
    if (group.rank(), group.size()) != (reshard_map.rank, len(sender.counts)):
        raise ValueError(
            f"{name} got a group in which this is rank {group.rank()} of {group.size()}, a map for "
            f"rank {reshard_map.rank} of {len(sender.counts)}"
        )


def to_plan(x_static: Tensor, reshard_map: ReshardMap, group: dist.ProcessGroup) -> Tensor:
    """Deals a tensor of the static layout to the ranks that the plan gives its tokens.

    A collective call: every rank of the domain makes it, in the same order among its collectives.

    Args:
        x_static: `[static tokens, ...]` a row for each token this rank holds in the static layout.
        reshard_map: the map of this rank and micro-batch.
        group: the domain's group.

    Returns:
        `[T, ...]` the rows of the plan's buffer; filler rows are zeros.

    Raises:
        ValueError: the tensor or the group is not the map's.
    """
    _check(x_static, reshard_map.static, reshard_map, group, "to_plan")
    return _Reshard.apply(x_static, reshard_map.static, reshard_map.plan, group)


def to_static(x_plan: Tensor, reshard_map: ReshardMap, group: dist.ProcessGroup) -> Tensor:
    """Gives a tensor of the plan layout back to the ranks that hold its tokens in the static one.

    A collective call, as `to_plan`.

    Args:
        x_plan: `[T, ...]` a row for each row of the plan's buffer; filler rows are dropped.
        reshard_map: the map of this rank and micro-batch.
        group: the domain's group.

    Returns:
        `[static tokens, ...]` a row for each token this rank holds in the static layout.

    Raises:
        ValueError: the tensor or the group is not the map's.
    """
    _check(x_plan, reshard_map.plan, reshard_map, group, "to_static")
    return _Reshard.apply(x_plan, reshard_map.plan, reshard_map.static, group)
