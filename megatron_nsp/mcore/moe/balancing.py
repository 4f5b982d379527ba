"""Balancing losses of experts, by what the whole domain's tokens choose.

With E experts of which a token chooses k, let an expert's share be the part of all n tokens'
choices that falls on it, times E: 1 where experts are even. Megatron's loss of n tokens is the mean
over tokens of the sum, over experts, of score times share:

    sum_e  E * c_e / (k * n)  *  (1 / n) sum_t score_te           c_e: tokens that chose expert e

So every token brings a loss of its own, as it does at the output, and its gradient needs no more
than the shares. They differ in which tokens count:

    aux_loss           those of the micro-batch
    seq_aux_loss       those of the token's own document
    global_aux_loss    those of the step so far, a mean over its micro-batches

As with `--calculate-per-token-loss` on one rank, losses are added up over tokens and divided once,
by the targets of the step; a document therefore weighs as much as it has tokens, and neither
placement nor, but for the first and the last, the division into micro-batches changes anything.

Choices are constants of the backward pass. Ranks add them up while later layers run and wait for
the sum in backward; the ranks of a domain do so in one order, those without tokens as well.

Shapes: T rows, E experts, D documents with tokens on a rank (`rows.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.mcore.moe.rows import RoutedRows, RowDocuments


class Counts(NamedTuple):
    """Tokens of the domain that chose each expert.

    Attributes:
        total_E: of the micro-batch.
        documents_DE: of each document with tokens on this rank, filler rows as one more; None
            where no loss asks for it.
    """

    total_E: Tensor
    documents_DE: Tensor | None


class CountsUnderWay:
    """Counts of one layer that the ranks of the domain are adding up.

    Args:
        chosen_TE: which experts each row chose; none in filler rows.
        documents: the document of each row, where counts by document are wanted.
        group: the tensor- and data-parallel ranks that hold rows of the micro-batch.
        tensor_group: those among them that share a buffer.
    """

    def __init__(
        self,
        chosen_TE: Tensor,
        documents: RowDocuments | None,
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup,
    ) -> None:
        """Starts the sum; every rank of the domain must."""
        self._documents, self._works = documents, []
        self._own_DE: Tensor | None = None
        total_E = chosen_TE.sum(dim=0)
        self._summed = total_E.unsqueeze(0)
        if documents is not None:
            self._own_DE = total_E.new_zeros(len(documents.lengths), len(total_E))
            self._own_DE.index_add_(0, documents.row_document, chosen_TE.to(total_E.dtype))
            self._summed = total_E.new_zeros(1 + documents.num_shared, len(total_E))
            self._summed[0] = total_E
            self._summed[1 + documents.shared_place] = self._own_DE[documents.shared]
        self._works.append(dist.all_reduce(self._summed, group=group, async_op=True))
        if self._own_DE is not None and tensor_group.size() > 1:
            # A document of one rank of the domain lies on all of its tensor-parallel ranks.
            self._works.append(dist.all_reduce(self._own_DE, group=tensor_group, async_op=True))

    def wait(self) -> Counts:
        """The counts, once."""
        for work in self._works:
            work.wait()
        if self._documents is not None and self._own_DE is not None:
            shared = self._summed[1 + self._documents.shared_place]
            self._own_DE[self._documents.shared] = shared
        return Counts(self._summed[0], self._own_DE)


class BalancingLoss(NamedTuple):
    """One loss.

    Attributes:
        coefficient: what it is multiplied by.
        shares: the experts' shares that rows are held against, `[E]` or `[T, E]`.
        log: takes the loss of this rank's rows, without coefficient, as a mean over the domain's.
    """

    coefficient: float
    shares: Callable[[Counts], Tensor]
    log: Callable[[Tensor], None]


def micro_batch_shares(counts: Counts, rows: RoutedRows, top_k: int) -> Tensor:
    """`[E]` shares among the tokens of the micro-batch."""
    total_E = counts.total_E
    return total_E * (len(total_E) / (top_k * max(1, rows.num_tokens)))


def document_shares(counts: Counts, rows: RoutedRows, top_k: int) -> Tensor:
    """`[T, E]` shares among the tokens of each row's document."""
    counts_DE, documents = counts.documents_DE, rows.documents
    assert counts_DE is not None
    per_choice = counts_DE.shape[1] / (top_k * documents.lengths)
    shares: Tensor = (counts_DE * per_choice.unsqueeze(1))[documents.row_document]
    return shares


class LateLoss(torch.autograd.Function):
    """The sum of balancing losses over this rank's rows, known only when backward comes.

    Forward returns a zero, which nobody reads: Megatron's `MoEAuxLossAutoScaler` hangs it behind
    the router's output and sends the scale of the main loss into it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores_TE: Tensor,
        counts: CountsUnderWay,
        losses: Sequence[BalancingLoss],
        num_tokens: int,
    ) -> Tensor:
        """Keeps what backward needs.

        Args:
            ctx: autograd's.
            scores_TE: the router's scores; zero in filler rows.
            counts: tokens of the domain by expert, on their way.
            losses: what to add up.
            num_tokens: tokens of the domain, at least 1.
        """
        ctx.save_for_backward(scores_TE)
        ctx.counts, ctx.losses, ctx.num_tokens = counts, losses, num_tokens
        return scores_TE.new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        """Waits for the counts; logs the losses and returns the scores' gradient."""
        (scores_TE,) = ctx.saved_tensors
        counts, gradient = ctx.counts.wait(), torch.zeros_like(scores_TE)
        for loss in ctx.losses:
            shares = loss.shares(counts).to(scores_TE.dtype)
            gradient += loss.coefficient * shares
            loss.log((scores_TE * shares).sum() / ctx.num_tokens)
        return gradient * scale, None, None, None
