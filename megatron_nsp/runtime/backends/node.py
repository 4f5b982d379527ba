"""One node's attention in both passes, for every way a node can be split (`split.py`).

    forward    tokens to heads | rounds of keys and kernel calls | heads to tokens
    backward   the same for the output's gradient, then gradients of keys go back to their members

With one ring member there is one round of one call: Ulysses. With more, what the calls give for the
same queries is merged by LSE in the precision of the LSE. Shapes are those of `ulysses.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nsp.runtime.backends.base import Exchange, NodeCall
from megatron_nsp.runtime.backends.blocks import Rows, split_for
from megatron_nsp.runtime.backends.ring import Gather, KeyExchange, KeysValues, Ring
from megatron_nsp.runtime.backends.ulysses import ToHeads, ToTokens, own_heads
from megatron_nsp.runtime.kernels.base import lse_dtype
from megatron_nsp.runtime.kernels.sink import add_sink, log_add_exp, sink_gradient


@dataclass(frozen=True, eq=False)
class HeadsState:
    """What backward needs of a node's forward: `[S, n, D]` on this rank's heads, LSE `[h, S]`."""

    q_ShD: Tensor
    k_SnD: Tensor
    v_SnV: Tensor
    out_ShV: Tensor
    lse_hS: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return (self.q_ShD, self.k_SnD, self.v_SnV, self.out_ShV, self.lse_hS)


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


def _key_exchange(call: NodeCall, k_SnD: Tensor, v_SnV: Tensor) -> KeyExchange | None:
    split = split_for(call.part.split, call.mask)
    if split.ring_degree == 1:
        return None
    return (Gather if split.outer == "gather" else Ring)(call, k_SnD, v_SnV)


def _own_sinks(call: NodeCall) -> Tensor | None:
    sink_H = call.sink_H
    return None if sink_H is None else sink_H[own_heads(call.part, len(sink_H))]


class Merged:
    """Output and LSE of queries whose keys come in parts."""

    def __init__(self, q_ShD: Tensor, value_dim: int) -> None:
        dtype = lse_dtype(q_ShD.dtype)
        self.out_ShV = q_ShD.new_zeros(*q_ShD.shape[:2], value_dim, dtype=dtype)
        self.lse_hS = q_ShD.new_full((q_ShD.shape[1], q_ShD.shape[0]), float("-inf"), dtype=dtype)

    def merge(self, rows: Rows, out_ShV: Tensor, lse_hS: Tensor) -> None:
        """Adds what `rows` of the queries got from further keys."""
        old_lse = rows.take(self.lse_hS, dim=1)
        lse = log_add_exp(old_lse, lse_hS)
        kept, added = (torch.exp(x - lse).transpose(0, 1).unsqueeze(2) for x in (old_lse, lse_hS))
        rows.put(self.out_ShV, rows.take(self.out_ShV) * kept + out_ShV * added)
        rows.put(self.lse_hS, lse, dim=1)


class _Rounds(ABC):
    """What both passes do with the tensors and the keys of their rounds.

    Args:
        call: the node.
    """

    def __init__(self, call: NodeCall) -> None:
        self.call = call
        self._keys: KeyExchange | None = None
        self._held: dict[int, KeysValues] = {}

    @property
    def keys(self) -> KeyExchange:
        """How keys get around; only nodes with several ring members have later rounds."""
        assert self._keys is not None, f"{self.call.part.split} has one round"
        return self._keys

    @abstractmethod
    def to_heads(self) -> ToHeads:
        """What the pass sends to the ranks of its ring member first."""

    @abstractmethod
    def begin(self, received: list[Tensor]) -> KeysValues:
        """Takes what came back; returns the keys and values of the first round."""

    def prologue(self, number: int) -> Exchange:
        """See `NodePass.prologue`."""
        if number:
            return self.keys.forth(number, self._held[number - 1])
        self._to_heads = self.to_heads()
        return self._to_heads.exchange

    def receive(self, number: int, received: Tensor) -> None:
        """See `NodePass.receive`."""
        if number:
            self._held[number] = self.keys.unpack(number, received)
            return
        self._held[0] = own = self.begin(self._to_heads.unpack(received))
        del self._to_heads
        self._keys = _key_exchange(self.call, *own)

    def held(self, number: int) -> KeysValues:
        """The keys and values of a round; those before it have been passed on by now."""
        self._held.pop(number - 1, None)
        return self._held[number]


class NodeForward(_Rounds):
    """Forward of one node; `state` afterwards holds what backward needs.

    Args:
        call: the node.
        q_THD: this rank's queries of the node.
        k_TKD: this rank's keys.
        v_TKV: this rank's values.
        out_THV: this rank's rows of the output, written by `finish`.
    """

    def __init__(
        self, call: NodeCall, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, out_THV: Tensor
    ) -> None:
        """Communicates nothing."""
        super().__init__(call)
        self._inputs = [q_THD, k_TKD, v_TKV]
        self._out_THV = out_THV
        self._merged: Merged | None = None

    def to_heads(self) -> ToHeads:
        """See `_Rounds.to_heads`."""
        part = self.call.part
        return ToHeads(part, self.call.group, self._inputs, [part.rank_tokens] * 3)

    def begin(self, received: list[Tensor]) -> KeysValues:
        """See `_Rounds.begin`."""
        self._q_ShD, *own = received
        self._own = own[0], own[1]
        if self.call.part.ring_degree > 1:
            self._merged = Merged(self._q_ShD, own[1].shape[2])
        return self._own

    def compute(self, number: int) -> None:
        """See `NodePass.compute`."""
        call, (k, v) = self.call, self.held(number)
        for block in call.rounds[number].blocks:
            out, lse = call.kernel.forward(
                block.q_rows.take(self._q_ShD),
                block.kv_rows.take(k),
                block.kv_rows.take(v),
                block.samples,
                block.mask_of(call.mask),
            )
            if self._merged is None:
                self._out, self._lse = out, lse
            else:
                self._merged.merge(block.q_rows, out, lse)

    def give_back(self, number: int) -> Exchange:
        """Forward returns nothing."""
        raise AssertionError(f"{number=}")

    def take_back(self, number: int, received: Tensor) -> None:
        """Forward returns nothing."""
        raise AssertionError(f"{number=}")

    def epilogue(self) -> Exchange:
        """See `NodePass.epilogue`."""
        if self._merged is not None:
            self._out = self._merged.out_ShV.to(self._q_ShD.dtype)
            self._lse, self._merged = self._merged.lse_hS, None
        sinks = _own_sinks(self.call)
        if sinks is not None:
            self._out, self._lse = add_sink(self._out, self._lse, sinks)
        self.state = HeadsState(self._q_ShD, *self._own, self._out, self._lse)
        heads = [self._out_THV.shape[1]]
        self._to_tokens = ToTokens(self.call.part, self.call.group, [self._out], heads)
        return self._to_tokens.exchange

    def finish(self, received: Tensor) -> None:
        """See `NodePass.finish`."""
        (out_THV,) = self._to_tokens.unpack(received)
        self._out_THV.copy_(out_THV)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Where a node's backward writes: this rank's rows of each, and the sinks of all heads."""

    dq_THD: Tensor
    dk_TKD: Tensor
    dv_TKV: Tensor
    dsink_H: Tensor | None = None


class NodeBackward(_Rounds):
    """Backward of one node.

    Args:
        call: the node.
        state: what forward computed of the samples that are not in `saved`; None if all are.
        saved: what was saved of the first samples.
        inputs: this rank's q, k and v of the samples in `saved`.
        dout_THV: this rank's gradient of the output.
        grads: where to write.
    """

    def __init__(
        self,
        call: NodeCall,
        state: HeadsState | None,
        saved: SavedOutput | None,
        inputs: tuple[Tensor, ...],
        dout_THV: Tensor,
        grads: Gradients,
    ) -> None:
        """Communicates nothing."""
        super().__init__(call)
        self._state, self._saved, self._grads = state, saved, grads
        self._sent = [dout_THV]
        if saved is not None:
            self._sent += [*inputs, saved.out_THV]
        self._totals: tuple[Tensor, ...] | None = None
        self._returning: dict[int, list[KeysValues]] = {}

    def to_heads(self) -> ToHeads:
        """See `_Rounds.to_heads`."""
        part, rows = self.call.part, [self.call.part.rank_tokens]
        if self._saved is not None:
            rest = part.without_first(self._saved.num_samples).rank_tokens
            first = tuple(a - b for a, b in zip(part.rank_tokens, rest, strict=True))
            rows += [first] * 4
        return ToHeads(part, self.call.group, self._sent, rows)

    def begin(self, received: list[Tensor]) -> KeysValues:
        """See `_Rounds.begin`."""
        self._dout_ShV, *gathered = received
        del self._sent
        if self._saved is not None:
            q, k, v, out = gathered
            first = HeadsState(q, k, v, out, self._saved.lse_hS)
            self._state = first if self._state is None else _joined(first, self._state)
        assert self._state is not None
        own = (self._state.k_SnD, self._state.v_SnV)
        if self.call.part.ring_degree > 1:
            dtype = lse_dtype(own[0].dtype)
            tensors = (self._state.q_ShD, *own)
            self._totals = tuple(torch.zeros_like(x, dtype=dtype) for x in tensors)
        return own

    def compute(self, number: int) -> None:
        """See `NodePass.compute`."""
        call, state, (k, v) = self.call, self._state, self.held(number)
        assert state is not None
        for block in call.rounds[number].blocks:
            q_rows, kv_rows = block.q_rows, block.kv_rows
            dq, dk, dv = call.kernel.backward(
                q_rows.take(self._dout_ShV),
                q_rows.take(state.q_ShD),
                kv_rows.take(k),
                kv_rows.take(v),
                q_rows.take(state.out_ShV),
                q_rows.take(state.lse_hS, dim=1),
                block.samples,
                block.mask_of(call.mask),
            )
            if self._totals is None:
                self._dqkv: tuple[Tensor, ...] = (dq, dk, dv)
                continue
            q_rows.add(self._totals[0], dq)
            if number:
                self._returning.setdefault(number, []).append((dk, dv))
            else:
                kv_rows.add(self._totals[1], dk)
                kv_rows.add(self._totals[2], dv)

    def give_back(self, number: int) -> Exchange:
        """See `NodePass.give_back`."""
        return self.keys.back(number, self._returning.pop(number, []))

    def take_back(self, number: int, received: Tensor) -> None:
        """See `NodePass.take_back`."""
        assert self._totals is not None
        self.keys.add(number, received, (self._totals[1], self._totals[2]))

    def epilogue(self) -> Exchange:
        """See `NodePass.epilogue`."""
        part, state, grads = self.call.part, self._state, self._grads
        assert state is not None
        sinks = _own_sinks(self.call)
        if sinks is not None and grads.dsink_H is not None:
            dsink = sink_gradient(self._dout_ShV, state.out_ShV, state.lse_hS, sinks)
            grads.dsink_H[own_heads(part, len(grads.dsink_H))] += dsink
        if self._totals is not None:
            self._dqkv = tuple(x.to(state.q_ShD.dtype) for x in self._totals)
        heads = [x.shape[1] for x in (grads.dq_THD, grads.dk_TKD, grads.dv_TKV)]
        self._to_tokens = ToTokens(part, self.call.group, self._dqkv, heads)
        return self._to_tokens.exchange

    def finish(self, received: Tensor) -> None:
        """See `NodePass.finish`."""
        grads = (self._grads.dq_THD, self._grads.dk_TKD, self._grads.dv_TKV)
        for grad, value in zip(grads, self._to_tokens.unpack(received), strict=True):
            grad.copy_(value)


def _joined(first: HeadsState, rest: HeadsState) -> HeadsState:
    """The state of the first samples and of the rest."""
    q, k, v, out = (
        torch.cat(pair) for pair in zip(first.tensors[:4], rest.tensors[:4], strict=True)
    )
    return HeadsState(q, k, v, out, torch.cat([first.lse_hS, rest.lse_hS], dim=1))
