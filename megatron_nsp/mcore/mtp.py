"""Multi-token prediction: Megatron's own layers on the documents' own tokens, and its loss.

What each depth sees comes with the micro-batch (`further_tokens.py`), so that no module holds state
and no row is rolled. Megatron weighs the loss of a depth by a ratio of counts of one rank and one
micro-batch; here they are those of the step, so that neither the placement nor the division into
micro-batches changes it:

    main loss                  sum over all targets / all targets
    + for each depth of K      scaling factor / K * sum over its targets / its targets
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import gpt_layer_specs, gpt_model
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    MultiTokenPredictionLayer,
    _compute_mtp_acceptance_counts,
)
from torch import Tensor

from megatron_nsp.mcore.further_tokens import num_targets
from megatron_nsp.mcore.packed_seq_params import NestedSeqParams
from megatron_nsp.mcore.spec import exchange_core_attention


class NestedMTPLayer(MultiTokenPredictionLayer):
    """Megatron's layer, which embeds the tokens of its depth in place of rolled ones."""

    def forward(
        self,
        *,
        input_ids: Tensor | int,
        position_ids: Tensor,
        packed_seq_params: NestedSeqParams,
        padding_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, int, Tensor, Tensor | None]:
        """Runs the next depth.

        Megatron's block hands a layer what the one before returned. In the place of token ids that
        is the depth that has run: one layer may run at all depths.

        Args:
            input_ids: `[1, T]` the micro-batch's tokens, from a later depth on the depth before.
            position_ids: `[1, T]` unused.
            packed_seq_params: the micro-batch.
            padding_mask: rows that hold no token, the same at every depth.
            others: Megatron's further arguments, handed on.

        Returns:
            Hidden states, the depth, and what it was given of positions and padding.
        """
        depth = (input_ids if isinstance(input_ids, int) else 0) + 1
        own = packed_seq_params.further[depth - 1]
        hidden_states, *_ = super().forward(
            input_ids=own.tokens,
            position_ids=own.positions,
            packed_seq_params=replace(packed_seq_params, depth=depth),
            padding_mask=padding_mask,
            **others,
        )
        return hidden_states, depth, position_ids, padding_mask

    def _get_embeddings(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Any,
        padding_mask: Tensor | None,
        packed_seq_params: NestedSeqParams,
        hidden_states: Tensor,
    ) -> Any:
        """Megatron's own, with the embedding of the tokens as they are and not of rolled ones."""

        def of_own_tokens(**_: Any) -> Any:
            return embedding(input_ids=input_ids, position_ids=position_ids)

        tokens, positions, _, *states = super()._get_embeddings(
            input_ids, position_ids, of_own_tokens, hidden_states
        )
        return tokens, positions, padding_mask, *states


def nested_mtp_loss(
    hidden_states: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    output_layer: Any,
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Any,
    config: Any,
    cp_group: Any = None,
    tp_group: Any = None,
    packed_seq_params: NestedSeqParams | None = None,
    scale_logits_fn: Any = None,
    input_ids: Tensor | None = None,
) -> Tensor:
    """Takes the place of Megatron's `process_mtp_loss`, whose arguments it has.

    The loss that is logged is that of all ranks and micro-batches of the step. Evaluation, which
    reports the main loss alone, works out none.

    Args:
        hidden_states: `[(1 + K) T, 1, hidden]` of the model and of each depth.
        labels: unused, as the next three are: `packed_seq_params` brings those of each depth.
        loss_mask: unused.
        cp_group: unused.
        input_ids: unused.
        output_layer: makes logits.
        output_weight: its weight, where it is the embedding's.
        runtime_gather_output: whether logits are gathered over tensor-parallel ranks.
        is_training: whether a backward pass will follow.
        compute_language_model_loss: the loss of each row, from labels and logits.
        config: Megatron's transformer configuration.
        tp_group: the tensor-parallel group.
        packed_seq_params: the micro-batch.
        scale_logits_fn: scales logits, where the model does.

    Returns:
        `[T, 1, hidden]` of the model, with the gradient of the further losses on its way.
    """
    hidden_states, *of_depths = torch.chunk(hidden_states, 1 + config.mtp_num_layers, dim=0)
    if not is_training:
        return hidden_states
    assert isinstance(packed_seq_params, NestedSeqParams), f"{type(packed_seq_params)=}"
    assert packed_seq_params.nested is not None
    plan, further = packed_seq_params.nested.plan, packed_seq_params.further
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()
    num_main = num_targets(plan, 0)
    for place, (states, own) in enumerate(zip(of_depths, further, strict=True)):
        logits, _ = output_layer(
            states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        losses = compute_language_model_loss(own.labels, logits)
        losses = torch.where(own.loss_mask > 0, losses, losses.new_zeros(()))
        num_own = max(num_targets(plan, place + 1), 1)
        counts = _compute_mtp_acceptance_counts(
            logits, own.labels, own.loss_mask, output_layer, runtime_gather_output, tp_group
        )
        MTPLossLoggingHelper.save_metrics_to_tracker(
            # Megatron divides by the micro-batches of a step when it logs.
            losses.sum() * (plan.num_micro_batches / num_own),
            *counts,
            place,
            config.mtp_num_layers,
            reduce_group=mpu.get_data_parallel_group(with_context_parallel=True),
        )
        # Megatron divides all gradients by the main loss's targets.
        weight = config.mtp_loss_scaling_factor / config.mtp_num_layers * num_main / num_own
        hidden_states = MTPLossAutoScaler.apply(hidden_states, weight * losses)
    return hidden_states


def install() -> None:
    """Puts the above into GPT models that are built from now on; a second call changes nothing.

    Megatron takes neither from a layer spec: it makes that of the layers itself, whatever `--spec`
    says, and calls the loss by name.
    """
    make_spec = gpt_layer_specs.get_mtp_layer_spec_for_backend
    if hasattr(make_spec, "__wrapped__"):
        return

    @functools.wraps(make_spec)
    def make_nested_spec(*args: Any, **kwargs: Any) -> Any:
        spec = make_spec(*args, **kwargs)
        exchange_core_attention(spec.submodules.mtp_model_layer)
        spec.module = NestedMTPLayer
        return spec

    gpt_layer_specs.get_mtp_layer_spec_for_backend = make_nested_spec
    gpt_model.process_mtp_loss = nested_mtp_loss
