"""Nested attention: every active node on a rank's path, in one autograd function.

Shapes: T rows of the rank's buffer (filler rows included), H query heads, K key/value heads, D head
dim. Filler rows come out as zeros and get zero gradients.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_nsp.backends.base import NodeCall
from megatron_nsp.backends.ulysses import UlyssesBackward, UlyssesForward
from megatron_nsp.executor import CommunicationQueue, play
from megatron_nsp.groups import NestedGroups
from megatron_nsp.kernels import AttentionKernel, AttentionMask, SampleBounds
from megatron_nsp.layout import RankLayout, rank_layout
from megatron_nsp.plan import Plan
from megatron_nsp.schedule import Pass, Step, build_schedule
from megatron_nsp.tree import Node


@dataclass(frozen=True, eq=False)
class NestedBatch:
    """One micro-batch of a plan as one rank sees it; made once and used by every layer.

    Attributes:
        plan: the plan of the step.
        micro_batch: which of its passes this is.
        layout: what this rank holds.
        overlap: whether the schedule streams the phases of consecutive nodes.
    """

    plan: Plan
    micro_batch: int
    layout: RankLayout
    overlap: bool

    @classmethod
    def build(
        cls,
        plan: Plan,
        rank: int,
        micro_batch: int = 0,
        row_multiple: int = 1,
        overlap: bool = True,
    ) -> "NestedBatch":
        """The batch of `rank`; see `layout.rank_layout` for the arguments."""
        layout = rank_layout(plan, rank, micro_batch, row_multiple)
        return cls(plan, micro_batch, layout, overlap)

    @cached_property
    def samples(self) -> dict[Node, SampleBounds]:
        """Sample bounds of each active node's stream."""
        return {part.node: SampleBounds(part.cu_seqlens) for part in self.layout.slices}

    def steps(self, pass_: Pass) -> tuple[Step, ...]:
        """The issue order of a pass."""
        return build_schedule([part.node for part in self.layout.slices], pass_, self.overlap)


@dataclass(frozen=True, eq=False)
class AttentionRuntime:
    """What a rank runs nested attention with; the same for every layer and step.

    Attributes:
        groups: the tree's groups.
        kernel: attention kernel.
        queue: communication queue.
    """

    groups: NestedGroups
    kernel: AttentionKernel
    queue: CommunicationQueue


def _node_calls(
    batch: NestedBatch, mask: AttentionMask, runtime: AttentionRuntime
) -> list[NodeCall]:
    """One entry an active node of the rank, root first."""
    return [
        NodeCall(
            part=part,
            samples=batch.samples[part.node],
            group=runtime.groups.group(part.node),
            kernel=runtime.kernel,
            mask=mask,
        )
        for part in batch.layout.slices
    ]


class _NestedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        batch: NestedBatch,
        mask: AttentionMask,
        runtime: AttentionRuntime,
    ) -> Tensor:
        out_THD = torch.zeros_like(q_THD)
        passes = {}
        for call in _node_calls(batch, mask, runtime):
            rows = call.part.buffer_slice
            passes[call.part.node] = UlyssesForward(
                call, q_THD[rows], k_TKD[rows], v_TKD[rows], out_THD[rows]
            )
        play(batch.steps(Pass.FWD), passes, runtime.queue)
        saved = [tensor for work in passes.values() for tensor in work.saved]
        ctx.save_for_backward(*saved)
        ctx.num_kv_heads = k_TKD.shape[1]
        ctx.call = (batch, mask, runtime)
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        batch, mask, runtime = ctx.call
        kv_shape = (dout_THD.shape[0], ctx.num_kv_heads, dout_THD.shape[2])
        grads = (
            torch.zeros_like(dout_THD, memory_format=torch.contiguous_format),
            dout_THD.new_zeros(kv_shape),
            dout_THD.new_zeros(kv_shape),
        )
        saved, per_node = ctx.saved_tensors, 5
        passes = {}
        for place, call in enumerate(_node_calls(batch, mask, runtime)):
            rows = call.part.buffer_slice
            passes[call.part.node] = UlyssesBackward(
                call,
                saved[place * per_node : (place + 1) * per_node],
                dout_THD[rows],
                (grads[0][rows], grads[1][rows], grads[2][rows]),
            )
        play(batch.steps(Pass.BWD), passes, runtime.queue)
        return (*grads, None, None, None)


def nested_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    batch: NestedBatch,
    mask: AttentionMask,
    runtime: AttentionRuntime,
) -> Tensor:
    """Attention of every sample to itself, each in the node its plan says.

    A collective call: every rank of the domain must make it, with its own part of the same plan.

    Args:
        q_THD: queries of this rank's buffer.
        k_TKD: keys; H is a multiple of K.
        v_TKD: values.
        batch: the micro-batch.
        mask: mask and scale.
        runtime: groups, kernel and queue.

    Returns:
        `out_THD`, zeros in filler rows.

    Raises:
        ValueError: the tensors do not have the rows of the batch's buffer.
    """
    if q_THD.shape[0] != batch.layout.buffer_tokens:
        raise ValueError(
            f"attention got {q_THD.shape[0]} rows, the plan gives rank {batch.layout.rank} "
            f"{batch.layout.buffer_tokens}"
        )
    return _NestedAttention.apply(q_THD, k_TKD, v_TKD, batch, mask, runtime)
