"""A node whose attention Transformer Engine runs itself: its ring or its Ulysses.

TE communicates inside its call, so the node has one step in each pass and nothing to stream. It
gives no LSE: its output cannot be kept in place of being computed again, and backward goes through
the autograd graph of its forward. That graph lives with the call of attention, not with TE's
module, and goes with its backward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nsp.runtime.backends.base import NodeCall
from megatron_nsp.runtime.backends.node import Gradients


def check_native(call: NodeCall, num_heads: int, num_kv_heads: int, num_saved: int) -> None:
    """Refuses what Transformer Engine's context parallelism cannot do.

    Args:
        call: the node.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        num_saved: samples of the node whose output is to be kept.

    Raises:
        ValueError: the run has no Transformer Engine, or the heads, the mask, sinks or samples to
            be saved are not for it.
    """
    part, mask = call.part, call.mask
    name = part.split.outer
    if call.native is None:
        raise ValueError(f"{name} needs Transformer Engine, which this run has not loaded")
    part.split.check_heads(part.degree, num_heads, num_kv_heads)
    if not mask.is_causal:
        raise ValueError(f"{name} fills samples up, which only a causal mask hides; got a full one")
    if mask.window_left is not None and name == "te-p2p":
        raise ValueError(f"{name} has no sliding window, got one of {mask.window_left} tokens")
    if call.sink_H is not None:
        raise ValueError(f"{name} serves no attention sinks, got {len(call.sink_H)}")
    if num_saved:
        raise ValueError(
            f"{name} gives no LSE, so none of its samples can be saved, got {num_saved} of a node "
            f"of degree {part.degree}"
        )


@dataclass(frozen=True, eq=False)
class Graph:
    """TE's forward of a node: its inputs, filled up, and its output with the graph behind it."""

    leaves: tuple[Tensor, Tensor, Tensor]
    out_FHV: Tensor


class NativeForward:
    """Forward of one node; of the methods of `NodePass` its schedule asks for `compute` alone.

    Args:
        call: the node.
        q_THD: this rank's queries of the node.
        k_TKD: this rank's keys.
        v_TKV: this rank's values.
        out_THV: this rank's rows of the output.
        has_backward: whether backward of this very pass may follow.
    """

    def __init__(
        self,
        call: NodeCall,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        out_THV: Tensor,
        has_backward: bool,
    ) -> None:
        """Communicates nothing."""
        self.call, self._out_THV, self._has_backward = call, out_THV, has_backward
        self._inputs = q_THD, k_TKD, v_TKV

    def compute(self, number: int) -> None:
        """Attends; a collective call for the ranks of the node."""
        call, filled = self.call, self.call.filled
        assert call.native is not None and filled is not None and call.group is not None
        q, k, v = (filled.fill(x).requires_grad_(self._has_backward) for x in self._inputs)
        method = call.part.split.outer.removeprefix("te-")
        with torch.set_grad_enabled(self._has_backward):
            out = call.native.attend(q, k, v, filled.samples, call.mask, call.group, method)
        self._out_THV.copy_(filled.rows.take(out.detach()))
        self.graph = Graph((q, k, v), out)


class NativeBackward:
    """Backward of one node, through the graph of its forward.

    Args:
        call: the node.
        graph: its forward.
        dout_THV: this rank's gradient of the output.
        grads: where to write.
    """

    def __init__(self, call: NodeCall, graph: Graph, dout_THV: Tensor, grads: Gradients) -> None:
        """Communicates nothing."""
        self.call, self._graph, self._dout_THV, self._grads = call, graph, dout_THV, grads

    def compute(self, number: int) -> None:
        """Runs TE's backward; a collective call for the ranks of the node."""
        filled, graph = self.call.filled, self._graph
        assert filled is not None
        found = torch.autograd.grad(graph.out_FHV, graph.leaves, filled.fill(self._dout_THV))
        targets = (self._grads.dq_THD, self._grads.dk_TKD, self._grads.dv_TKV)
        for target, grad in zip(targets, found, strict=True):
            target.copy_(filled.rows.take(grad))
