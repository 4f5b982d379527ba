"""Ulysses: exchange tokens for heads, attend to whole samples, exchange back.

Source: DeepSpeed-Ulysses (Jacobs et al., 2023), in an uneven form: one
all-to-all for q, k and v together, one for the output, and the same in backward.

Shapes: T this rank's tokens of the node, S tokens of the node's stream, H and K query and key/value
heads before the exchange, d the degree, D the head dim. After it a rank holds h = H/d query heads
and the key/value heads these need, n = max(K/d, 1). When d > K several ranks receive the same
key/value head; the gradients of the copies are summed where the head came from.
"""

import torch
from torch import Tensor

from megatron_nsp.backends.base import Exchange, NodeCall


def split_heads(x_THD: Tensor, degree: int) -> Tensor:
    """`[d, T, n, D]` the heads each rank needs, repeated where ranks share a head."""
    num_heads = x_THD.shape[1]
    if num_heads % degree:
        assert degree % num_heads == 0, f"{num_heads=} {degree=}"
        # Rank r attends with query heads of key/value head r * K // d.
        return x_THD.transpose(0, 1).unsqueeze(2).repeat_interleave(degree // num_heads, dim=0)
    return x_THD.unflatten(1, (degree, -1)).transpose(0, 1)


def join_heads(x_dTnD: Tensor, num_heads: int) -> Tensor:
    """`[T, num_heads, D]` the inverse of `split_heads`; copies of a head are summed."""
    degree = x_dTnD.shape[0]
    if num_heads % degree:
        copies = x_dTnD.squeeze(2).unflatten(0, (num_heads, degree // num_heads))  # [K, d/K, T, D]
        return copies.sum(dim=1).transpose(0, 1)
    return x_dTnD.transpose(0, 1).flatten(1, 2)


class UlyssesForward:
    """Forward of one node; `saved` afterwards holds what backward needs.

    Args:
        call: the node.
        q_THD: this rank's queries of the node.
        k_TKD: this rank's keys.
        v_TKD: this rank's values.
        out_THD: this rank's rows of the output, written by `finish`.
    """

    def __init__(
        self, call: NodeCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor
    ) -> None:
        """Communicates nothing."""
        self.call = call
        self.qkv = (q_THD, k_TKD, v_TKD)
        self.out_THD = out_THD
        self.saved: tuple[Tensor, ...] = ()

    def prologue(self) -> Exchange:
        """Sends to each rank the heads it attends with."""
        degree = self.call.part.degree
        per_rank = [split_heads(x, degree) for x in self.qkv]
        self.head_counts = [x.shape[2] for x in per_rank]
        send = torch.cat(per_rank, dim=2).flatten(0, 1)  # [d*T, h+2n, D]
        return _tokens_to_heads(send, self.call)

    def compute(self, received: Tensor) -> None:
        """Attends to the whole stream with this rank's heads; `received` is `[S, h+2n, D]`."""
        q, k, v = (x.contiguous() for x in received.split(self.head_counts, dim=1))
        out, lse = self.call.kernel.forward(q, k, v, self.call.samples, self.call.mask)
        self.saved = (q, k, v, out, lse)

    def epilogue(self) -> Exchange:
        """Sends to each rank the output of its tokens."""
        return _heads_to_tokens(self.saved[3], self.call)

    def finish(self, received: Tensor) -> None:
        """Writes the output of this rank's tokens; `received` is `[d*T, h, D]`."""
        per_rank = received.unflatten(0, (self.call.part.degree, -1))
        self.out_THD.copy_(join_heads(per_rank, self.out_THD.shape[1]))


class UlyssesBackward:
    """Backward of one node.

    Args:
        call: the node.
        saved: `UlyssesForward.saved`.
        dout_THD: this rank's gradient of the output.
        grads: this rank's rows of dq `[T, H, D]`, dk and dv `[T, K, D]`, written by `finish`.
    """

    def __init__(
        self,
        call: NodeCall,
        saved: tuple[Tensor, ...],
        dout_THD: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Communicates nothing."""
        self.call = call
        self.saved, self.dout_THD, self.grads = saved, dout_THD, grads

    def prologue(self) -> Exchange:
        """Sends to each rank the output gradient of its heads."""
        send = split_heads(self.dout_THD, self.call.part.degree).flatten(0, 1)  # [d*T, h, D]
        return _tokens_to_heads(send, self.call)

    def compute(self, received: Tensor) -> None:
        """Runs the kernel's backward on the whole stream; `received` is `[S, h, D]`."""
        q, k, v, out, lse = self.saved
        dqkv = self.call.kernel.backward(
            received, q, k, v, out, lse, self.call.samples, self.call.mask
        )
        self.head_counts = [x.shape[1] for x in dqkv]
        self.dqkv = torch.cat(dqkv, dim=1)  # [S, h+2n, D]

    def epilogue(self) -> Exchange:
        """Sends to each rank the gradients of its tokens."""
        return _heads_to_tokens(self.dqkv, self.call)

    def finish(self, received: Tensor) -> None:
        """Writes dq, dk and dv of this rank's tokens; `received` is `[d*T, h+2n, D]`."""
        per_rank = received.unflatten(0, (self.call.part.degree, -1)).split(self.head_counts, dim=2)
        for grad, parts in zip(self.grads, per_rank, strict=True):
            grad.copy_(join_heads(parts, grad.shape[1]))


def _tokens_to_heads(send: Tensor, call: NodeCall) -> Exchange:
    own_rows = (call.part.num_tokens,) * call.part.degree
    return Exchange(send.contiguous(), own_rows, call.part.rank_tokens, call.group)


def _heads_to_tokens(send: Tensor, call: NodeCall) -> Exchange:
    own_rows = (call.part.num_tokens,) * call.part.degree
    return Exchange(send.contiguous(), call.part.rank_tokens, own_rows, call.group)
