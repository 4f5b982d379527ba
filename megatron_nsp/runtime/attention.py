"""Nested attention: every active node on a rank's path, in one autograd function.

Shapes: T rows of the rank's buffer (filler rows included), H query heads, K key/value heads, D and
V head dims of keys and values. Filler rows come out as zeros and get zero gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice, RankLayout, rank_layout
from megatron_nsp.plan.order import ROOT_FIRST, Order, in_order
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples
from megatron_nsp.plan.schedule import Pass, Step, build_schedule
from megatron_nsp.plan.tree import Node
from megatron_nsp.runtime.backends.base import NodeCall
from megatron_nsp.runtime.backends.blocks import Filled, Rounds, node_rounds, split_for
from megatron_nsp.runtime.backends.native import NativeBackward, NativeForward, check_native
from megatron_nsp.runtime.backends.node import (
    Gradients,
    HeadsState,
    NodeBackward,
    NodeForward,
    SavedOutput,
)
from megatron_nsp.runtime.executor import CommunicationQueue, play
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionKernel, AttentionMask, NativeAttention

SavedLayer = dict[Node, SavedOutput]


@dataclass(frozen=True, eq=False)
class NestedBatch:
    """One micro-batch of a plan as one rank sees it; made once and used by every layer.

    Attributes:
        plan: the plan of the step.
        micro_batch: which of its micro-batches this is.
        layout: what this rank holds.
        overlap: whether the schedule streams the phases of consecutive nodes.
        saved_samples: samples whose attention output is saved where a layer is recomputed.
        orders: in which order nodes run in each pass; root first for one that is not there.
        saved_outputs: what the layers have saved so far, by layer number; empty when a forward
            pass begins.
    """

    plan: Plan
    micro_batch: int
    layout: RankLayout
    overlap: bool
    saved_samples: SavedSamples = NOTHING_SAVED
    orders: Mapping[Pass, Order] = field(default_factory=dict)
    saved_outputs: dict[int, SavedLayer] = field(default_factory=dict)
    _rounds: dict[tuple[Node, int, bool, int | None], Rounds] = field(default_factory=dict)
    _filled: dict[Node, Filled] = field(default_factory=dict)
    _steps: dict[tuple[Any, ...], tuple[Step, ...]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        plan: Plan,
        rank: int,
        micro_batch: int = 0,
        row_multiple: int = 1,
        overlap: bool = True,
        saved_samples: SavedSamples = NOTHING_SAVED,
        orders: Mapping[Pass, Order] | None = None,
    ) -> "NestedBatch":
        """The batch of `rank`; see `layout.rank_layout` for the arguments."""
        layout = rank_layout(plan, rank, micro_batch, row_multiple)
        return cls(plan, micro_batch, layout, overlap, saved_samples, orders or {})

    @cached_property
    def num_saved(self) -> dict[Node, int]:
        """Samples at the head of each active node's stream whose output is to be saved."""
        return {
            part.node: self.saved_samples.of_node(self.micro_batch, part.node)
            for part in self.layout.slices
        }

    def rounds(self, part: NodeSlice, mask: AttentionMask) -> Rounds:
        """The kernel calls of a slice of a node, or of its samples after the first ones."""
        key = (part.node, len(part.samples), mask.is_causal, mask.window_left)
        if key not in self._rounds:
            self._rounds[key] = node_rounds(part, mask)
        return self._rounds[key]

    def filled(self, part: NodeSlice) -> Filled:
        """How the samples of a native node are filled up."""
        if part.node not in self._filled:
            self._filled[part.node] = Filled.of(part)
        return self._filled[part.node]

    def steps(
        self, parts: Sequence[NodeSlice], pass_: Pass, mask: AttentionMask
    ) -> tuple[Step, ...]:
        """The issue order of a pass over these slices of active nodes."""
        key = (pass_, mask, *(part.node for part in parts))
        if key not in self._steps:
            splits = {part.node: split_for(part.split, mask) for part in parts}
            order = self.orders.get(pass_, ROOT_FIRST) if self.overlap else ROOT_FIRST
            path = in_order(splits, order)
            self._steps[key] = build_schedule(path, pass_, self.overlap, splits)
        return self._steps[key]


@dataclass(frozen=True, eq=False)
class AttentionRuntime:
    """What a rank runs nested attention with; the same for every layer and step.

    Attributes:
        groups: the tree's groups.
        kernel: attention kernel.
        queue: communication queue.
        native: what runs the nodes that Transformer Engine is to run itself.
    """

    groups: NestedGroups
    kernel: AttentionKernel
    queue: CommunicationQueue
    native: NativeAttention | None = None


@dataclass(frozen=True)
class Layer:
    """The layer that calls attention, where it may be recomputed.

    Attributes:
        number: its number on this rank.
        is_training: whether a backward pass will follow; evaluation saves nothing.
        output_stays: whether whoever takes the output of the first pass holds on to it until the
            layer is recomputed, as an output projection outside the checkpoint does. What is saved
            then refers to it.
    """

    number: int
    is_training: bool
    output_stays: bool = False


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of nested attention on one rank, apart from its tensors."""

    batch: NestedBatch
    mask: AttentionMask
    runtime: AttentionRuntime
    layer: Layer | None
    saved: SavedLayer
    """Of a recomputation: what the first pass saved."""
    saves: bool
    """Whether this is a first pass that will be recomputed."""
    has_backward: bool
    """Whether backward of this very pass may follow."""

    def node(self, part: NodeSlice, sink_H: Tensor | None) -> NodeCall:
        is_native = part.split.is_native
        return NodeCall(
            part=part,
            rounds=() if is_native else self.batch.rounds(part, self.mask),
            group=self.runtime.groups.group(part.node),
            kernel=self.runtime.kernel,
            mask=self.mask,
            sink_H=sink_H,
            filled=self.batch.filled(part) if is_native else None,
            native=self.runtime.native,
        )

    def remaining(self) -> list[NodeSlice]:
        """What of each node is not saved; nodes of which nothing is left are not there."""
        parts = []
        for part in self.batch.layout.slices:
            saved = self.saved.get(part.node)
            rest = part if saved is None else part.without_first(saved.num_samples)
            if len(rest.samples):
                parts.append(rest)
        return parts

    def play(self, parts: Sequence[NodeSlice], pass_: Pass, passes: dict[Node, Any]) -> None:
        play(self.batch.steps(parts, pass_, self.mask), passes, self.runtime.queue)

    def save(self, out_THV: Tensor, passes: dict[Node, NodeForward]) -> None:
        """Saves the output of the marked samples for the recomputation of this layer."""
        assert self.layer is not None
        saved: SavedLayer = {}
        for part in self.batch.layout.slices:
            count = self.batch.num_saved[part.node]
            if count == 0:
                continue
            rest = part.without_first(count)
            rows = slice(part.buffer_start, rest.buffer_start)
            lse_hS = passes[part.node].state.lse_hS
            tokens = part.stream_tokens - (rest.stream_tokens if len(rest.samples) else 0)
            out = out_THV[rows] if self.layer.output_stays else out_THV[rows].clone()
            saved[part.node] = SavedOutput(count, out, lse_hS[:, :tokens].clone())
        self.batch.saved_outputs[self.layer.number] = saved

    def state_tensors(self, part: NodeSlice, state: HeadsState) -> tuple[Tensor | None, ...]:
        """What to save of a node's forward; None for an output that is in the layer's anyway.

        Where tokens are not exchanged for heads, q, k and v are rows of the layer's: a view would
        keep all of its buffer alive. Where that is kept anyway, for saved samples, views cost
        nothing.
        """
        q, k, v, out, lse = state.tensors
        if self.has_backward and not self.saved:
            q, k, v = (_alone(x) for x in (q, k, v))
        return q, k, v, (None if part.ulysses_degree == 1 else out), lse


def _alone(x: Tensor) -> Tensor:
    """The tensor in memory of its own: a copy if it is part of something larger."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


class _NestedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        sink_H: Tensor | None,
        call: _Call,
    ) -> Tensor:
        out_THV = q_THD.new_zeros(*q_THD.shape[:2], v_TKV.shape[2])
        parts: list[NodeSlice] = call.remaining()
        passes: dict[Node, Any] = {}
        for part in parts:
            rows, node = part.buffer_slice, call.node(part, sink_H)
            tensors = q_THD[rows], k_TKD[rows], v_TKV[rows], out_THV[rows]
            if part.split.is_native:
                passes[part.node] = NativeForward(node, *tensors, call.has_backward)
            else:
                passes[part.node] = NodeForward(node, *tensors)
        call.play(parts, Pass.FWD, passes)
        for part in call.batch.layout.slices:
            if part.node in call.saved:
                saved_THV = call.saved[part.node].out_THV
                out_THV[part.buffer_start : part.buffer_start + len(saved_THV)] = saved_THV
        if call.saves:
            call.save(out_THV, passes)
        own = [part for part in parts if not part.split.is_native]
        states = [call.state_tensors(part, passes[part.node].state) for part in own]
        # Tensors that carry a graph: what it holds is saved by it.
        ctx.graphs = {part.node: passes[part.node].graph for part in parts if part not in own}
        inputs = (q_THD, k_TKD, v_TKV) if call.saved else (None, None, None)
        output = out_THV if any(part.ulysses_degree == 1 for part in parts) else None
        ctx.save_for_backward(sink_H, *inputs, output, *(x for state in states for x in state))
        ctx.kv_shapes = k_TKD.shape, v_TKV.shape
        ctx.head_dim = q_THD.shape[2]
        ctx.call = call
        return out_THV

    @staticmethod
    def backward(ctx: Any, dout_THV: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        sink_H, *saved = ctx.saved_tensors
        inputs, output_THV, states = saved[:3], saved[3], saved[4:]
        shapes = (*dout_THV.shape[:2], ctx.head_dim), *ctx.kv_shapes
        grads = [dout_THV.new_zeros(shape) for shape in shapes]
        state_of = {}
        own = [part for part in call.remaining() if not part.split.is_native]
        for place, part in enumerate(own):
            q, k, v, out, lse = states[5 * place : 5 * place + 5]
            out = output_THV[part.buffer_slice] if out is None else out
            state_of[part.node] = HeadsState(q, k, v, out, lse)
        parts = call.batch.layout.slices
        passes: dict[Node, Any] = {}
        dsink_NH = None  # a row a node, so that their order changes no bit of the sum
        if sink_H is not None:
            dsink_NH = sink_H.new_zeros(len(parts), len(sink_H), dtype=torch.float64)
        for place, part in enumerate(parts):
            rows, saved_output = part.buffer_slice, call.saved.get(part.node)
            dsink_H = None if dsink_NH is None else dsink_NH[place]
            node_grads = Gradients(grads[0][rows], grads[1][rows], grads[2][rows], dsink_H)
            if part.split.is_native:
                passes[part.node] = NativeBackward(
                    call.node(part, None), ctx.graphs.pop(part.node), dout_THV[rows], node_grads
                )
                continue
            first: tuple[Tensor, ...] = ()
            if saved_output is not None:
                start = part.buffer_start
                first = tuple(x[start : start + len(saved_output.out_THV)] for x in inputs)
            passes[part.node] = NodeBackward(
                call.node(part, sink_H),
                state_of.get(part.node),
                saved_output,
                first,
                dout_THV[rows],
                node_grads,
            )
        call.play(parts, Pass.BWD, passes)
        return (*grads, None if dsink_NH is None else dsink_NH.sum(0).to(sink_H.dtype), None)


def nested_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKV: Tensor,
    batch: NestedBatch,
    mask: AttentionMask,
    runtime: AttentionRuntime,
    sink_H: Tensor | None = None,
    layer: Layer | None = None,
) -> Tensor:
    """Attention of every sample to itself, each in the node its plan says.

    A collective call: every rank of the domain must make it, with its own part of the same plan.

    Args:
        q_THD: queries of this rank's buffer.
        k_TKD: keys; H is a multiple of K.
        v_TKV: values.
        batch: the micro-batch.
        mask: mask and scale.
        runtime: groups, kernel and queue.
        sink_H: attention sinks, one more score for each query head with a value of zeros. Their
            gradient is this rank's part of a sum over all ranks.
        layer: which layer calls. With it a first pass without gradients, as activation
            checkpointing makes it, saves the output of the batch's marked samples, and the pass
            that recomputes the layer takes it from there.

    Returns:
        `out_THV`, zeros in filler rows.

    Raises:
        ValueError: the tensors do not have the rows of the batch's buffer, or Transformer Engine
            is to run a node that it cannot.
    """
    if q_THD.shape[0] != batch.layout.buffer_tokens:
        raise ValueError(
            f"attention got {q_THD.shape[0]} rows, the plan gives rank {batch.layout.rank} "
            f"{batch.layout.buffer_tokens}"
        )
    saved: SavedLayer = {}
    is_first = not torch.is_grad_enabled() and layer is not None and layer.is_training
    if layer is not None and not is_first:
        saved = batch.saved_outputs.pop(layer.number, {})
    saves = is_first and any(batch.num_saved.values())
    call = _Call(batch, mask, runtime, layer, saved, saves, torch.is_grad_enabled())
    for part in batch.layout.slices:
        if part.split.is_native:
            heads = q_THD.shape[1], k_TKD.shape[1]
            check_native(call.node(part, sink_H), *heads, batch.num_saved[part.node])
    out_THV: Tensor = _NestedAttention.apply(q_THD, k_TKD, v_TKV, sink_H, call)
    return out_THV
