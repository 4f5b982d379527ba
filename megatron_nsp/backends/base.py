"""The interface between the executor and an SP backend.

A backend splits the attention of one node into three phases. Only the exchanges communicate, and
they are values: the backend packs what it sends, the executor hands the exchange to a communication
queue, and the backend unpacks what came back. A `NodePass` lives for one call; a backend itself
holds no state, since several nodes, layers and micro-batches are live at once.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_nsp.kernels.base import AttentionKernel, AttentionMask, SampleBounds
from megatron_nsp.layout import NodeSlice


@dataclass(frozen=True, eq=False)
class Exchange:
    """One all-to-all among the ranks of a node.

    Attributes:
        send: `[sum(send_rows), ...]` contiguous; the rows for each rank of the node, in rank order.
        send_rows: rows for each rank.
        recv_rows: rows from each rank.
        group: the node's group; None when the node has one rank, which then keeps what it sends.
    """

    send: Tensor
    send_rows: tuple[int, ...]
    recv_rows: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass(frozen=True, eq=False)
class NodeCall:
    """What both passes of one attention call need to know of one node.

    Attributes:
        part: this rank's slice of the node.
        samples: the bounds of the node's samples.
        group: the node's group.
        kernel: attention kernel.
        mask: mask and scale.
    """

    part: NodeSlice
    samples: SampleBounds
    group: dist.ProcessGroup | None
    kernel: AttentionKernel
    mask: AttentionMask


class NodePass(Protocol):
    """One node's work in one pass (forward or backward) of one attention call.

    Attributes:
        call: the node.
    """

    call: NodeCall

    def prologue(self) -> Exchange:
        """Packs what the compute phase needs from the other ranks. Does not communicate."""
        ...

    def compute(self, received: Tensor) -> None:
        """Runs the kernel on what the prologue received. Does not communicate."""
        ...

    def epilogue(self) -> Exchange:
        """Packs the results for the ranks they belong to. Does not communicate."""
        ...

    def finish(self, received: Tensor) -> None:
        """Writes what the epilogue received into this rank's rows of the result."""
        ...
