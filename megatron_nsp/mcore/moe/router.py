"""Megatron's router, whose losses, biases and figures are those of the whole domain.

Routing itself stays Megatron's: a token's experts follow from its own hidden state. What Megatron
counts on one rank is counted over the domain here, without filler rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_nsp.mcore.moe.balancing import (
    BalancingLoss,
    Counts,
    CountsUnderWay,
    LateLoss,
    document_shares,
    micro_batch_shares,
)
from megatron_nsp.mcore.moe.figures import figure_of, num_layers
from megatron_nsp.mcore.moe.rows import RoutedRows
from megatron_nsp.mcore.moe.sinkhorn import sinkhorn

Shares = Callable[[Counts, RoutedRows, int], Tensor]


class NestedRouter(TopKRouter):
    """A top-k router of one part of the domain's rows; Megatron's in weights and checkpoints."""

    def routing(self, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """Routes by logits, and adds the losses.

        Args:
            logits: `[T, 1, E]`.
            padding_mask: the rows, as Megatron's `forward` passes on what it is given as the mask.

        Returns:
            `[T, E]` weights of the experts, and which are chosen.
        """
        rows: RoutedRows = padding_mask
        assert isinstance(rows, RoutedRows), f"{type(rows)=}"
        # Layers that are recomputed run first without gradients: they count when they run again.
        adds_losses = self.training and torch.is_grad_enabled()
        if adds_losses:
            logits = self._with_z_loss(logits, rows)
        if self.routing_type == "sinkhorn":
            probs, routing_map = self._by_sinkhorn(logits.view(-1, self.num_experts), rows)
            self._apply_expert_bias(routing_map, rows.is_filler.view(-1))
            return probs, routing_map
        probs, routing_map = super().routing(logits, rows.is_filler)
        if adds_losses and any(self._coefficients.values()):
            probs = self._with_balancing(probs, logits, rows)
        return probs, routing_map

    def is_aux_loss_enabled(self) -> bool:
        """Never Megatron's own, which count the tokens of one rank."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Nothing: `routing` has done it for all tokens of the domain."""
        return logits

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Megatron combines choices of [T, E] with a mask of [T].
        assert padding_mask is not None
        super()._apply_expert_bias(routing_map, padding_mask.unsqueeze(-1))

    def _by_sinkhorn(self, logits_TE: Tensor, rows: RoutedRows) -> tuple[Tensor, Tensor]:
        """Megatron's `sinkhorn_load_balancing`, scaled over the domain."""
        if self.topk == 1:
            scores_TE = torch.sigmoid(logits_TE)
        else:
            scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).type_as(logits_TE)
        weighed_TE = scores_TE.detach()
        if self.training:
            logits = logits_TE.detach().to(dtype=torch.float32)
            tokens = max(1, rows.num_tokens)
            weighed_TE = sinkhorn(logits, rows.is_filler, tokens, self.tp_dp_cp_group)
        chosen = torch.topk(weighed_TE, k=self.topk, dim=1).indices
        routing_map = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen, True)
        return scores_TE * routing_map, routing_map

    @property
    def _coefficients(self) -> dict[str, float]:
        return {name: self.get_aux_loss_coeff(name) for name in self._shares}

    @property
    def _shares(self) -> dict[str, Shares]:
        return {
            "aux_loss": micro_batch_shares,
            "seq_aux_loss": document_shares,
            "global_aux_loss": self._step_shares,
        }

    def _step_shares(self, counts: Counts, rows: RoutedRows, top_k: int) -> Tensor:
        """`[E]` shares by the mean of the step's counts so far; Megatron's sums, once a backward.

        Megatron adds to them in forward: the same order of micro-batches in every layer. One
        without samples counts as none.
        """
        if not rows.num_tokens:
            return micro_batch_shares(counts, rows, top_k)
        self.global_tokens_per_expert += counts.total_E
        self.ga_steps += 1
        mean_E = self.global_tokens_per_expert / self.ga_steps
        return micro_batch_shares(Counts(mean_E, None), rows, top_k)

    def _with_z_loss(self, logits: Tensor, rows: RoutedRows) -> Tensor:
        """Adds the square of each row's log-sum; Megatron logs a mean of the ranks' means."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None:
            return logits
        squares = torch.logsumexp(logits, dim=-1).square().masked_fill(rows.is_filler, 0.0)
        loss = squares.sum()
        self._log("z_loss", loss.detach() / max(1, rows.num_tokens))
        return MoEAuxLossAutoScaler.apply(logits, coefficient * loss)

    def _with_balancing(self, probs: Tensor, logits: Tensor, rows: RoutedRows) -> Tensor:
        chosen_TE, scores_TE = compute_routing_scores_for_aux_loss(
            logits.view(-1, self.num_experts),
            self.topk,
            self.score_function,
            fused=self.config.moe_router_fusion,
            padding_mask=rows.is_filler.view(-1),
        )
        by_document = self._coefficients["seq_aux_loss"] != 0
        documents = rows.documents if by_document else None
        counts = CountsUnderWay(chosen_TE, documents, self.tp_dp_cp_group, self.tp_group)
        losses = [self._balancing_loss(name, rows) for name, c in self._coefficients.items() if c]
        loss = LateLoss.apply(scores_TE, counts, losses, max(1, rows.num_tokens))
        return MoEAuxLossAutoScaler.apply(probs, loss)

    def _balancing_loss(self, name: str, rows: RoutedRows) -> BalancingLoss:
        shares = self._shares[name]
        return BalancingLoss(
            self._coefficients[name] * self._passes_share,
            lambda counts: shares(counts, rows, self.topk),
            partial(self._log, figure_of(name)),
        )

    @property
    def _passes_share(self) -> float:
        """One over how often a step's tokens pass this layer: more than once in repeated MTP."""
        config = self.config
        is_repeated = self.is_mtp_layer and config.mtp_use_repeated_layer
        return 1.0 / (config.mtp_num_layers or 1) if is_repeated else 1.0

    def _log(self, name: str, loss: Tensor) -> None:
        """Adds this rank's part of a loss to Megatron's figures, which add up the domain's."""
        config = self.config
        get_moe_metrics_tracker().record(
            name,
            loss * self._passes_share,
            self.layer_number + (config.num_layers if self.is_mtp_layer else 0),
            num_layers(config),
            reduce_group=self.tp_dp_cp_group,
            needs_dp_avg=False,
        )
