"""The interface between the executor and an SP backend.

A backend splits the attention of one node into phases. Only the exchanges communicate, and they are
values: the backend packs what it sends, the executor hands the exchange to a communication queue,
and the backend unpacks what came back. A `NodePass` lives for one call; a backend itself holds no
state, since several nodes, layers and micro-batches are live at once.

Shapes: T this rank's tokens of the node, H query and K key/value heads, D and V dims of keys and
values, S tokens in the stream of its ring member, h of the query heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.runtime.kernels.base import AttentionKernel, AttentionMask, NativeAttention


@dataclass(frozen=True, eq=False)
class Exchange:
    """One all-to-all among the ranks of a node; those that have nothing for each other stay out.

    Attributes:
        send: `[sum(send_counts)]` contiguous; the elements for each rank of the node, in rank
            order.
        send_counts: elements for each rank.
        recv_counts: elements from each rank.
        group: the node's group; None when nothing leaves the rank, which then keeps what it sends.
    """

    send: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass(frozen=True, eq=False)
class NodeCall[Rows]:
    """What a pass of one attention call needs to know of one node.

    Attributes:
        part: this rank's slice of the node.
        rows: what its backend has prepared of it for all calls with such a mask.
        group: the node's group.
        kernel: attention kernel.
        mask: mask and scale.
        sink_H: attention sinks of all query heads, if the layer has some.
        native: what runs native nodes, if the run has it.
    """

    part: NodeSlice
    rows: Rows
    group: dist.ProcessGroup | None
    kernel: AttentionKernel
    mask: AttentionMask
    sink_H: Tensor | None = None
    native: NativeAttention | None = None

    def check(self, num_heads: int, num_kv_heads: int, num_saved: int) -> None:
        """Refuses what the node's backend cannot do.

        Args:
            num_heads: query heads.
            num_kv_heads: key/value heads.
            num_saved: samples of the node whose output is to be saved.

        Raises:
            ValueError: the run has no Transformer Engine, or the heads, the mask, sinks or samples
                to be saved are not for it.
        """
        part, mask, backend = self.part, self.mask, self.part.split.backend
        if backend.is_native and self.native is None:
            raise ValueError(
                f"{backend.name} needs Transformer Engine, which this run has not loaded"
            )
        backend.check_heads(part.degree, num_heads, num_kv_heads)
        if backend.fills_samples and not mask.is_causal:
            raise ValueError(
                f"{backend.name} fills samples up, which only a causal mask hides; got a full one"
            )
        if mask.window_left is not None and not backend.serves_windows:
            raise ValueError(
                f"{backend.name} has no sliding window, got one of {mask.window_left} tokens"
            )
        if self.sink_H is not None and not backend.serves_sinks:
            raise ValueError(f"{backend.name} serves no attention sinks, got {len(self.sink_H)}")
        if num_saved and not backend.gives_lse:
            raise ValueError(
                f"{backend.name} gives no LSE, so none of its samples can be saved, got "
                f"{num_saved} of a node of degree {part.degree}"
            )


class NodeTensors(NamedTuple):
    """This rank's rows of a node, and where the rows of the output are written."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKV: Tensor
    out_THV: Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """Where a node's backward writes: this rank's rows of each, and the sinks of all heads."""

    dq_THD: Tensor
    dk_TKD: Tensor
    dv_TKV: Tensor
    dsink_H: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SavedOutput:
    """What was saved of the first samples of a node, so that they are not computed again.

    Attributes:
        num_samples: how many samples.
        out_THV: the output of this rank's tokens of them.
        lse_hS: the LSE of this rank's heads of all their tokens in its member's stream.
    """

    num_samples: int
    out_THV: Tensor
    lse_hS: Tensor


class NodeState(Protocol):
    """What a forward pass leaves for the backward pass of its node."""

    @property
    def lse_hS(self) -> Tensor | None:  # noqa: N802 - shapes are upper case
        """The LSE, where the backend gives it."""
        ...

    def to_save(self, part: NodeSlice, in_own_memory: bool) -> tuple[Tensor | None, ...]:
        """The tensors for autograd to hold.

        Args:
            part: the rank's slice of the node.
            in_own_memory: copy what would keep a larger tensor of the layer alive.

        Returns:
            The tensors; None for one that is made of the rows of the layer's output.
        """
        ...

    def restored(self, saved: Sequence[Tensor | None], out_THV: Tensor | None) -> "NodeState":
        """The state again.

        Args:
            saved: what `to_save` gave.
            out_THV: this rank's rows of the layer's output, if some state needs them.
        """
        ...


class NodePass:
    """One node's work in one pass (forward or backward) of one attention call.

    The schedule of a backend decides which of these are asked for; a pass implements them.

    Attributes:
        call: the node.
    """

    def __init__(self, call: NodeCall) -> None:
        """Communicates nothing."""
        self.call = call

    def prologue(self, number: int) -> Exchange:
        """Packs what round `number` needs from other ranks; like all of these, sends nothing.

        What the round before needed has been received by then.
        """
        raise AssertionError(f"{type(self).__name__} has no prologue {number}")

    def receive(self, number: int, received: Tensor) -> None:
        """Takes what the prologue of round `number` received."""
        raise AssertionError(f"{type(self).__name__} has no prologue {number}")

    def compute(self, number: int) -> None:
        """Runs the kernel on what the prologues received, or all of a native node."""
        raise AssertionError(f"{type(self).__name__} has no round {number}")

    def give_back(self, number: int) -> Exchange:
        """Packs the gradients of the keys of round `number` for those who hold the keys."""
        raise AssertionError(f"{type(self).__name__} returns nothing in round {number}")

    def take_back(self, number: int, received: Tensor) -> None:
        """Adds what others returned in round `number`."""
        raise AssertionError(f"{type(self).__name__} returns nothing in round {number}")

    def epilogue(self) -> Exchange:
        """Packs the results for the ranks they belong to."""
        raise AssertionError(f"{type(self).__name__} has no epilogue")

    def finish(self, received: Tensor) -> None:
        """Writes what the epilogue received into this rank's rows of the result."""
        raise AssertionError(f"{type(self).__name__} has no epilogue")


class ForwardPass(NodePass):
    """Forward of one node.

    Attributes:
        state: what backward needs; there once the pass is over.
    """

    state: NodeState


class Backend[Rows, State: NodeState](ABC):
    """How the ranks of a node run its attention: the mechanism of `plan.backends.Backend`."""

    @abstractmethod
    def prepare(self, part: NodeSlice, mask: AttentionMask) -> Rows:
        """What all calls of a micro-batch with such a mask share; of the mask not the scale."""

    @abstractmethod
    def forward(
        self, call: NodeCall[Rows], tensors: NodeTensors, has_backward: bool
    ) -> ForwardPass:
        """Forward of one node.

        Args:
            call: the node.
            tensors: its rows.
            has_backward: whether backward of this very pass may follow.
        """

    @abstractmethod
    def backward(
        self,
        call: NodeCall[Rows],
        state: State | None,
        saved: "SavedInputs | None",
        dout_THV: Tensor,
        grads: Gradients,
    ) -> NodePass:
        """Backward of one node.

        Args:
            call: the node.
            state: what forward left of the samples that are not in `saved`; None if all are.
            saved: what was saved of the first samples.
            dout_THV: this rank's gradient of the output.
            grads: where to write.
        """


class SavedInputs(NamedTuple):
    """The first samples of a node, whose output was saved, and this rank's rows of them."""

    output: SavedOutput
    q_THD: Tensor
    k_TKD: Tensor
    v_TKV: Tensor
