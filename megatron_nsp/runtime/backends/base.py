"""The interface between the executor and an SP backend.

A backend splits the attention of one node into phases. Only the exchanges communicate, and they are
values: the backend packs what it sends, the executor hands the exchange to a communication queue,
and the backend unpacks what came back. A `NodePass` lives for one call; a backend itself holds no
state, since several nodes, layers and micro-batches are live at once.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.runtime.backends.blocks import Filled, Rounds
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
class NodeCall:
    """What a pass of one attention call needs to know of one node.

    Attributes:
        part: this rank's slice of the node.
        rounds: what its ring member computes in each round; none in a native node.
        group: the node's group.
        kernel: attention kernel.
        mask: mask and scale.
        sink_H: attention sinks of all query heads, if the layer has some.
        filled: how a native node's samples are filled up.
        native: what runs native nodes, if the run has it.
    """

    part: NodeSlice
    rounds: Rounds
    group: dist.ProcessGroup | None
    kernel: AttentionKernel
    mask: AttentionMask
    sink_H: Tensor | None = None
    filled: Filled | None = None
    native: NativeAttention | None = None


class NodePass(Protocol):
    """One node's work in one pass (forward or backward) of one attention call.

    Attributes:
        call: the node.
    """

    call: NodeCall

    def prologue(self, number: int) -> Exchange:
        """Packs what round `number` needs from other ranks; like all of these, sends nothing.

        What the round before needed has been received by then.
        """
        ...

    def receive(self, number: int, received: Tensor) -> None:
        """Takes what the prologue of round `number` received."""
        ...

    def compute(self, number: int) -> None:
        """Runs the kernel on what the prologues received."""
        ...

    def give_back(self, number: int) -> Exchange:
        """Packs the gradients of the keys of round `number` for those who hold the keys."""
        ...

    def take_back(self, number: int, received: Tensor) -> None:
        """Adds what others returned in round `number`."""
        ...

    def epilogue(self) -> Exchange:
        """Packs the results for the ranks they belong to."""
        ...

    def finish(self, received: Tensor) -> None:
        """Writes what the epilogue received into this rank's rows of the result."""
        ...
