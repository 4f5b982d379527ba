"""A node whose attention Transformer Engine runs itself: its ring or its Ulysses.

TE communicates inside its call, so the node has one step in each pass and nothing to stream. It
gives no LSE: its output cannot be saved in place of being computed again, and backward goes through
the autograd graph of its forward. That graph lives with the call of attention, not with TE's
module, and goes with its backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.ring_rows import filled_bounds, filled_rows
from megatron_nsp.runtime.backends.base import (
    Backend,
    ForwardPass,
    Gradients,
    NodeCall,
    NodePass,
    NodeTensors,
    SavedInputs,
)
from megatron_nsp.runtime.backends.blocks import Rows
from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds, VarlenCall


@dataclass(frozen=True, eq=False)
class Filled:
    """A node's samples where all chunks are filled up to the same length.

    Attributes:
        rows: where this rank's tokens are among its filled-up rows.
        num_rows: how many these are.
        samples: bounds of the whole samples, filled up.
    """

    rows: Rows
    num_rows: int
    samples: SampleBounds

    @classmethod
    def of(cls, part: NodeSlice) -> "Filled":
        """Of this rank's slice of the node."""
        bounds = filled_bounds(part.dealing)
        num_rows = int(bounds[-1]) // part.num_members
        return cls(
            Rows.of(filled_rows(part.dealing, part.member), num_rows),
            num_rows,
            SampleBounds(bounds),
        )

    def fill(self, x: Tensor) -> Tensor:
        """`[num_rows, ...]` the rank's rows of `x` in their places, zeros elsewhere; a copy."""
        filled = x.new_zeros(self.num_rows, *x.shape[1:])
        self.rows.put(filled, x)
        return filled


class Graph:
    """TE's forward of a node: its inputs, filled up, and its output with the graph behind it.

    It holds by itself what backward needs, and only until that begins.
    """

    lse_hS = None

    def __init__(self, leaves: Sequence[Tensor], out_FHV: Tensor) -> None:
        """Holds them."""
        self._held: tuple[Sequence[Tensor], Tensor] | None = leaves, out_FHV

    def take(self) -> tuple[Sequence[Tensor], Tensor]:
        """The inputs and the output, once."""
        assert self._held is not None, "TE's graph is gone after one backward"
        held, self._held = self._held, None
        return held

    def to_save(self, part: NodeSlice, in_own_memory: bool) -> tuple[Tensor | None, ...]:
        """Nothing that autograd would have to hold."""
        return ()

    def restored(self, saved: Sequence[Tensor | None], out_THV: Tensor | None) -> "Graph":
        """Itself."""
        return self


class TransformerEngine(Backend[Filled, Graph]):
    """Leaves a node to TE.

    Args:
        method: what TE calls its way: 'p2p' or 'a2a'.
    """

    def __init__(self, method: str) -> None:
        """Needs no TE before a node is run."""
        self.method = method

    @override
    def prepare(self, part: NodeSlice, mask: AttentionMask) -> Filled:
        return Filled.of(part)

    @override
    def forward(
        self, call: NodeCall[Filled], tensors: NodeTensors, has_backward: bool
    ) -> ForwardPass:
        return _Forward(call, tensors, has_backward, self.method)

    @override
    def backward(
        self,
        call: NodeCall[Filled],
        state: Graph | None,
        saved: SavedInputs | None,
        dout_THV: Tensor,
        grads: Gradients,
    ) -> NodePass:
        assert state is not None and saved is None, "TE gives no LSE to save"
        return _Backward(call, state, dout_THV, grads)


class _Forward(ForwardPass):
    def __init__(
        self, call: NodeCall[Filled], tensors: NodeTensors, has_backward: bool, method: str
    ) -> None:
        super().__init__(call)
        self._tensors, self._has_backward, self._method = tensors, has_backward, method

    @override
    def compute(self, number: int) -> None:
        """Attends; a collective call for the ranks of the node."""
        call, filled = self.call, self.call.rows
        assert call.native is not None and call.group is not None
        filled_call = VarlenCall(filled.samples, call.mask)
        *inputs, out_THV = self._tensors
        q, k, v = (filled.fill(x).requires_grad_(self._has_backward) for x in inputs)
        with torch.set_grad_enabled(self._has_backward):
            out = call.native.attend(q, k, v, filled_call, call.group, self._method)
        out_THV.copy_(filled.rows.take(out.detach()))
        self.state = Graph((q, k, v), out)


class _Backward(NodePass):
    """Through the graph of the forward pass."""

    def __init__(
        self, call: NodeCall[Filled], graph: Graph, dout_THV: Tensor, grads: Gradients
    ) -> None:
        super().__init__(call)
        self._graph, self._dout_THV, self._grads = graph, dout_THV, grads

    @override
    def compute(self, number: int) -> None:
        """Runs TE's backward; a collective call for the ranks of the node."""
        filled, (leaves, out_FHV) = self.call.rows, self._graph.take()
        found = torch.autograd.grad(out_FHV, leaves, filled.fill(self._dout_THV))
        targets = (self._grads.dq_THD, self._grads.dk_TKD, self._grads.dv_TKV)
        for target, grad in zip(targets, found, strict=True):
            target.copy_(filled.rows.take(grad))
