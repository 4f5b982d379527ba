"""A node whose heads are divided inside its ring members and whose keys go between them.

    forward    tokens to heads | rounds of keys and kernel calls | heads to tokens
    backward   the same for the output's gradient, then gradients of keys go back to their members

With one ring member there is one round of one call: Ulysses. With more, what the calls give for the
same queries is merged by LSE in the precision of the LSE. A pass holds one thing at a time: what it
has sent to heads, then its rounds, then what it has sent to tokens. Shapes are those of
`ulysses.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.runtime.backends.base import (
    Backend,
    Exchange,
    ForwardPass,
    Gradients,
    NodeCall,
    NodePass,
    NodeTensors,
    SavedInputs,
)
from megatron_nsp.runtime.backends.blocks import Rounds, Rows, one_round
from megatron_nsp.runtime.backends.members import KeyExchange, KeysValues
from megatron_nsp.runtime.backends.merged import Merged
from megatron_nsp.runtime.backends.ulysses import ToHeads, ToTokens, own_heads
from megatron_nsp.runtime.kernels.base import AttentionMask, AttentionState, lse_dtype
from megatron_nsp.runtime.kernels.sink import add_sink, sink_gradient


@dataclass(frozen=True, eq=False)
class HeadsState:
    """What backward needs of a node's forward: `[S, n, D]` on this rank's heads, LSE `[h, S]`."""

    q_ShD: Tensor
    k_SnD: Tensor
    v_SnV: Tensor
    out_ShV: Tensor
    lse_hS: Tensor

    def to_save(self, part: NodeSlice, in_own_memory: bool) -> tuple[Tensor | None, ...]:
        """The tensors for autograd to hold.

        Where tokens are not exchanged for heads, q, k and v are rows of the layer's, and the output
        is rows of the layer's output.
        """
        q, k, v = self.q_ShD, self.k_SnD, self.v_SnV
        if in_own_memory:
            q, k, v = map(_alone, (q, k, v))
        return q, k, v, (None if part.member_ranks == 1 else self.out_ShV), self.lse_hS

    @staticmethod
    def restored(saved: Sequence[Tensor | None], out_THV: Tensor | None) -> "HeadsState":
        """The state again, its output the rows of the layer's if it was not saved."""
        q, k, v, out, lse = saved
        out = out_THV if out is None else out
        assert q is not None and k is not None and v is not None
        assert out is not None and lse is not None
        return HeadsState(q, k, v, out, lse)

    def followed_by(self, rest: "HeadsState") -> "HeadsState":
        """The state of these samples and of the rest."""
        pairs = (
            (self.q_ShD, rest.q_ShD),
            (self.k_SnD, rest.k_SnD),
            (self.v_SnV, rest.v_SnV),
            (self.out_ShV, rest.out_ShV),
        )
        q, k, v, out = map(torch.cat, pairs)
        return HeadsState(q, k, v, out, torch.cat([self.lse_hS, rest.lse_hS], dim=1))


def _alone(x: Tensor) -> Tensor:
    """The tensor in memory of its own: a copy if it is part of something larger."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


class HeadsAndKeys(Backend[Rounds, HeadsState]):
    """Heads inside a ring member, keys between members.

    Args:
        keys: how the keys get around.
    """

    def __init__(self, keys: type[KeyExchange]) -> None:
        """Nothing but the choice."""
        self.keys = keys

    @override
    def prepare(self, part: NodeSlice, mask: AttentionMask) -> Rounds:
        return one_round(part, mask) if part.num_members == 1 else self.keys.rounds(part, mask)

    @override
    def forward(
        self, call: NodeCall[Rounds], tensors: NodeTensors, has_backward: bool
    ) -> "NodeForward":
        return NodeForward(call, self.keys, tensors)

    @override
    def backward(
        self,
        call: NodeCall[Rounds],
        state: HeadsState | None,
        saved: SavedInputs | None,
        dout_THV: Tensor,
        grads: Gradients,
    ) -> "NodeBackward":
        return NodeBackward(call, self.keys, state, saved, dout_THV, grads)


class _Rounds(ABC):
    """The rounds of a pass, once a rank has the tokens of its ring member.

    Args:
        call: the node.
        keys: how the keys get around.
        own: this rank's keys and values, those of the first round.
    """

    def __init__(self, call: NodeCall[Rounds], keys: type[KeyExchange], own: KeysValues) -> None:
        self.call, self.keys = call, keys(call, *own)
        self._held = {0: own}

    def forth(self, number: int) -> Exchange:
        return self.keys.forth(number, self._held[number - 1])

    def receive(self, number: int, received: Tensor) -> None:
        self._held[number] = self.keys.unpack(number, received)

    def held(self, number: int) -> KeysValues:
        """The keys and values of a round; those before it have been passed on by now."""
        self._held.pop(number - 1, None)
        return self._held[number]

    @abstractmethod
    def compute(self, number: int) -> None:
        """Runs the kernel calls of a round."""


class _HeadsPass[R: _Rounds](NodePass):
    """What both passes have in common.

    Args:
        call: the node.
    """

    def __init__(self, call: NodeCall[Rounds]) -> None:
        super().__init__(call)
        self._to_heads: ToHeads | None = None
        self._rounds: R | None = None
        self._to_tokens: ToTokens | None = None

    @abstractmethod
    def enter(self) -> ToHeads:
        """Packs what goes to the ranks of the ring member first."""

    @abstractmethod
    def begin(self, received: list[Tensor]) -> R:
        """The rounds, with what came back."""

    @abstractmethod
    def leave(self, rounds: R) -> ToTokens:
        """Packs what the rounds gave for the ranks whose tokens it is of."""

    @abstractmethod
    def write(self, results: list[Tensor]) -> None:
        """Takes what came back in the end."""

    @property
    def rounds(self) -> R:
        """The rounds; there from the first keys to the epilogue."""
        assert self._rounds is not None, f"{type(self).__name__} is outside its rounds"
        return self._rounds

    @override
    def prologue(self, number: int) -> Exchange:
        if number:
            return self.rounds.forth(number)
        self._to_heads = self.enter()
        return self._to_heads.exchange

    @override
    def receive(self, number: int, received: Tensor) -> None:
        if number:
            self.rounds.receive(number, received)
            return
        assert self._to_heads is not None
        self._rounds, self._to_heads = self.begin(self._to_heads.unpack(received)), None

    @override
    def compute(self, number: int) -> None:
        self.rounds.compute(number)

    @override
    def epilogue(self) -> Exchange:
        self._to_tokens, self._rounds = self.leave(self.rounds), None
        return self._to_tokens.exchange

    @override
    def finish(self, received: Tensor) -> None:
        assert self._to_tokens is not None
        self.write(self._to_tokens.unpack(received))


class _One:
    """Output and LSE of queries whose keys come all at once."""

    def merge(self, rows: Rows, out_ShV: Tensor, lse_hS: Tensor) -> None:
        self._result = out_ShV, lse_hS

    def result(self) -> tuple[Tensor, Tensor]:
        return self._result


class _ForwardRounds(_Rounds):
    def __init__(
        self, call: NodeCall[Rounds], keys: type[KeyExchange], q_ShD: Tensor, own: KeysValues
    ) -> None:
        super().__init__(call, keys, own)
        self.q_ShD, self.own = q_ShD, own
        self._found = Merged(q_ShD, own[1].shape[2]) if call.part.num_members > 1 else _One()

    @override
    def compute(self, number: int) -> None:
        call, (k, v) = self.call, self.held(number)
        for block in call.rows[number].blocks:
            out, lse = call.kernel.forward(
                block.q_rows.take(self.q_ShD),
                block.kv_rows.take(k),
                block.kv_rows.take(v),
                block.call(call.mask),
            )
            self._found.merge(block.q_rows, out, lse)

    def state(self) -> HeadsState:
        """What the rounds gave, with sinks."""
        out, lse = self._found.result()
        sinks = _own_sinks(self.call)
        if sinks is not None:
            out, lse = add_sink(out, lse, sinks)
        return HeadsState(self.q_ShD, *self.own, out, lse)


class NodeForward(_HeadsPass[_ForwardRounds], ForwardPass):
    """Forward of one node.

    Args:
        call: the node.
        keys: how the keys get around.
        tensors: this rank's rows.
    """

    def __init__(
        self, call: NodeCall[Rounds], keys: type[KeyExchange], tensors: NodeTensors
    ) -> None:
        """Communicates nothing."""
        super().__init__(call)
        self._keys, self._tensors = keys, tensors

    @override
    def enter(self) -> ToHeads:
        part = self.call.part
        return ToHeads(part, self.call.group, self._tensors[:3], [part.rank_tokens] * 3)

    @override
    def begin(self, received: list[Tensor]) -> _ForwardRounds:
        q, k, v = received
        return _ForwardRounds(self.call, self._keys, q, (k, v))

    @override
    def leave(self, rounds: _ForwardRounds) -> ToTokens:
        self.state = rounds.state()
        heads = [self._tensors.out_THV.shape[1]]
        return ToTokens(self.call.part, self.call.group, [self.state.out_ShV], heads)

    @override
    def write(self, results: list[Tensor]) -> None:
        (out_THV,) = results
        self._tensors.out_THV.copy_(out_THV)


class _BackwardRounds(_Rounds):
    def __init__(
        self, call: NodeCall[Rounds], keys: type[KeyExchange], state: HeadsState, dout_ShV: Tensor
    ) -> None:
        own = state.k_SnD, state.v_SnV
        super().__init__(call, keys, own)
        self.state, self.dout_ShV = state, dout_ShV
        self._totals: tuple[Tensor, ...] | None = None
        if call.part.num_members > 1:
            dtype = lse_dtype(own[0].dtype)
            self._totals = tuple(torch.zeros_like(x, dtype=dtype) for x in (state.q_ShD, *own))
        self._returning: dict[int, list[KeysValues]] = {}

    @override
    def compute(self, number: int) -> None:
        call, state, (k, v) = self.call, self.state, self.held(number)
        for block in call.rows[number].blocks:
            q_rows, kv_rows = block.q_rows, block.kv_rows
            of_block = AttentionState(
                q_rows.take(state.q_ShD),
                kv_rows.take(k),
                kv_rows.take(v),
                q_rows.take(state.out_ShV),
                q_rows.take(state.lse_hS, dim=1),
            )
            dout = q_rows.take(self.dout_ShV)
            dq, dk, dv = call.kernel.backward(dout, of_block, block.call(call.mask))
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
        return self.keys.back(number, self._returning.pop(number, []))

    def take_back(self, number: int, received: Tensor) -> None:
        assert self._totals is not None
        self.keys.add(number, received, (self._totals[1], self._totals[2]))

    def gradients(self) -> tuple[Tensor, ...]:
        """Of q, k and v, in their dtype."""
        if self._totals is None:
            return self._dqkv
        return tuple(x.to(self.state.q_ShD.dtype) for x in self._totals)


class NodeBackward(_HeadsPass[_BackwardRounds]):
    """Backward of one node; for the arguments see `Backend.backward`."""

    def __init__(
        self,
        call: NodeCall[Rounds],
        keys: type[KeyExchange],
        state: HeadsState | None,
        saved: SavedInputs | None,
        dout_THV: Tensor,
        grads: Gradients,
    ) -> None:
        """Communicates nothing."""
        super().__init__(call)
        self._keys, self._state, self._saved = keys, state, saved
        self._dout_THV, self._grads = dout_THV, grads

    @override
    def enter(self) -> ToHeads:
        part, saved = self.call.part, self._saved
        tensors, rows = [self._dout_THV], [part.rank_tokens]
        if saved is not None:
            rest = part.without_first(saved.output.num_samples).rank_tokens
            first = tuple(a - b for a, b in zip(part.rank_tokens, rest, strict=True))
            tensors += [saved.q_THD, saved.k_TKD, saved.v_TKV, saved.output.out_THV]
            rows += [first] * 4
        return ToHeads(part, self.call.group, tensors, rows)

    @override
    def begin(self, received: list[Tensor]) -> _BackwardRounds:
        dout_ShV, *gathered = received
        state, self._state = self._state, None
        if self._saved is not None:
            q, k, v, out = gathered
            first = HeadsState(q, k, v, out, self._saved.output.lse_hS)
            state = first if state is None else first.followed_by(state)
        assert state is not None
        return _BackwardRounds(self.call, self._keys, state, dout_ShV)

    @override
    def give_back(self, number: int) -> Exchange:
        return self.rounds.give_back(number)

    @override
    def take_back(self, number: int, received: Tensor) -> None:
        self.rounds.take_back(number, received)

    @override
    def leave(self, rounds: _BackwardRounds) -> ToTokens:
        part, state, grads = self.call.part, rounds.state, self._grads
        sinks = _own_sinks(self.call)
        if sinks is not None and grads.dsink_H is not None:
            dsink = sink_gradient(rounds.dout_ShV, state.out_ShV, state.lse_hS, sinks)
            grads.dsink_H[own_heads(part, len(grads.dsink_H))] += dsink
        heads = [x.shape[1] for x in (grads.dq_THD, grads.dk_TKD, grads.dv_TKV)]
        return ToTokens(part, self.call.group, rounds.gradients(), heads)

    @override
    def write(self, results: list[Tensor]) -> None:
        grads = (self._grads.dq_THD, self._grads.dk_TKD, self._grads.dv_TKV)
        for grad, value in zip(grads, results, strict=True):
            grad.copy_(value)


def _own_sinks(call: NodeCall[Rounds]) -> Tensor | None:
    sink_H = call.sink_H
    return None if sink_H is None else sink_H[own_heads(call.part, len(sink_H))]
