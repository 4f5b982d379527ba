"""Nested attention: every active node on a rank's path, in one autograd function.

Shapes: T rows of the rank's buffer (filler rows included), H query heads, K key/value heads, D and
V head dims of keys and values. Filler rows come out as zeros and get zero gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice, RankLayout, rank_layout
from megatron_nsp.plan.order import ROOT_FIRST, Order, in_order
from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.ring_rows import KeyMask
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples
from megatron_nsp.plan.schedule import Step, build_schedule
from megatron_nsp.plan.tree import Node
from megatron_nsp.runtime.backends import mechanism
from megatron_nsp.runtime.backends.base import (
    ForwardPass,
    Gradients,
    NodeCall,
    NodePass,
    NodeState,
    NodeTensors,
    SavedInputs,
    SavedOutput,
)
from megatron_nsp.runtime.backends.blocks import key_mask
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
            pass begins. Passes over several chunks of a model each have their own; what is prepared
            of the plan they share.
    """

    plan: Plan
    micro_batch: int
    layout: RankLayout
    overlap: bool
    saved_samples: SavedSamples = NOTHING_SAVED
    orders: Mapping[Pass, Order] = field(default_factory=dict)
    saved_outputs: dict[int, SavedLayer] = field(default_factory=dict)
    _rows: dict[tuple[Node, int, KeyMask], Any] = field(default_factory=dict)
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

    def rows(self, part: NodeSlice, mask: AttentionMask) -> Any:
        """What the backend prepares of a slice of a node, or of what of it is not saved."""
        key = (part.node, len(part.samples), key_mask(mask))
        if key not in self._rows:
            self._rows[key] = mechanism(part.split, mask).prepare(part, mask)
        return self._rows[key]

    def steps(
        self, parts: Sequence[NodeSlice], pass_: Pass, mask: AttentionMask
    ) -> tuple[Step, ...]:
        """The issue order of a pass over these slices of active nodes."""
        key = (pass_, mask, *(part.node for part in parts))
        if key not in self._steps:
            splits = {part.node: part.split.under(key_mask(mask)) for part in parts}
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
        return NodeCall(
            part=part,
            rows=self.batch.rows(part, self.mask),
            group=self.runtime.groups.group(part.node),
            kernel=self.runtime.kernel,
            mask=self.mask,
            sink_H=sink_H,
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

    def save(self, out_THV: Tensor, passes: dict[Node, ForwardPass]) -> None:
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
            assert lse_hS is not None, f"{part.split} gives no LSE"
            tokens = part.stream_tokens - (rest.stream_tokens if len(rest.samples) else 0)
            out = out_THV[rows] if self.layer.output_stays else out_THV[rows].clone()
            saved[part.node] = SavedOutput(count, out, lse_hS[:, :tokens].clone())
        self.batch.saved_outputs[self.layer.number] = saved


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
        parts = call.remaining()
        passes: dict[Node, ForwardPass] = {}
        for part in parts:
            tensors = NodeTensors(*(x[part.buffer_slice] for x in (q_THD, k_TKD, v_TKV, out_THV)))
            how = mechanism(part.split, call.mask)
            passes[part.node] = how.forward(call.node(part, sink_H), tensors, call.has_backward)
        play(call.batch.steps(parts, Pass.FWD, call.mask), passes, call.runtime.queue)
        for part in call.batch.layout.slices:
            if part.node in call.saved:
                saved_THV = call.saved[part.node].out_THV
                out_THV[part.buffer_start : part.buffer_start + len(saved_THV)] = saved_THV
        if call.saves:
            call.save(out_THV, passes)
        # Views of the layer's tensors keep all of them alive. Where those are held anyway, for
        # saved samples, views cost nothing.
        in_own_memory = call.has_backward and not call.saved
        held: list[Tensor | None] = []
        ctx.restore = {}
        for part in parts:
            state = passes[part.node].state
            tensors_of_state = state.to_save(part, in_own_memory)
            ctx.restore[part.node] = state.restored, len(tensors_of_state)
            held += tensors_of_state
        inputs = (q_THD, k_TKD, v_TKV) if call.saved else (None, None, None)
        output = out_THV if any(part.member_ranks == 1 for part in parts) else None
        ctx.save_for_backward(sink_H, *inputs, output, *held)
        ctx.kv_shapes = k_TKD.shape, v_TKV.shape
        ctx.head_dim = q_THD.shape[2]
        ctx.call = call
        return out_THV

    @staticmethod
    def backward(ctx: Any, dout_THV: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        sink_H, *inputs, output_THV = ctx.saved_tensors[:5]
        held = iter(ctx.saved_tensors[5:])
        shapes = (*dout_THV.shape[:2], ctx.head_dim), *ctx.kv_shapes
        grads = [dout_THV.new_zeros(shape) for shape in shapes]
        states: dict[Node, NodeState] = {}
        for part in call.remaining():
            restored, count = ctx.restore[part.node]
            out_THV = None if output_THV is None else output_THV[part.buffer_slice]
            states[part.node] = restored(list(islice(held, count)), out_THV)
        parts = call.batch.layout.slices
        passes: dict[Node, NodePass] = {}
        dsink_NH = None  # a row a node, so that their order changes no bit of the sum
        if sink_H is not None:
            dsink_NH = sink_H.new_zeros(len(parts), len(sink_H), dtype=torch.float64)
        for place, part in enumerate(parts):
            saved, output = None, call.saved.get(part.node)
            if output is not None:
                first = slice(part.buffer_start, part.buffer_start + len(output.out_THV))
                saved = SavedInputs(output, *(x[first] for x in inputs))
            rows = part.buffer_slice
            dsink_H = None if dsink_NH is None else dsink_NH[place]
            passes[part.node] = mechanism(part.split, call.mask).backward(
                call.node(part, sink_H),
                states.pop(part.node, None),
                saved,
                dout_THV[rows],
                Gradients(grads[0][rows], grads[1][rows], grads[2][rows], dsink_H),
            )
        play(call.batch.steps(parts, Pass.BWD, call.mask), passes, call.runtime.queue)
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
        ValueError: the tensors do not have the rows of the batch's buffer, or a node's backend
            cannot do what is asked.
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
        heads = q_THD.shape[1], k_TKD.shape[1]
        call.node(part, sink_H).check(*heads, batch.num_saved[part.node])
    out_THV: Tensor = _NestedAttention.apply(q_THD, k_TKD, v_TKV, sink_H, call)
    return out_THV
