"""What Megatron logs of balancing: every layer's losses, added up over the domain."""

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Balancing losses, as flags call them."""


def figure_of(loss: str) -> str:
    """The name under which Megatron logs a balancing loss."""
    return loss.replace("aux_loss", "load_balancing_loss")


def num_layers(config: Any) -> int:
    """Layers that figures are logged of, those of multi-token prediction after the others."""
    return int(config.num_layers + (config.mtp_num_layers or 0))


def add_up_over_domain(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Has Megatron add up figures over the domain on this pipeline stage; a pre-wrap hook.

    A stage whose layers record none would else log a mean of what it is sent by those that do.
    """
    tracker, config = get_moe_metrics_tracker(), models[0].config
    if config.num_moe_experts is not None:  # type: ignore[union-attr]
        for name in (*map(figure_of, LOSSES), "z_loss"):
            tracker.ensure_initialized(name, num_layers(config))
            entry = tracker.metrics[name]
            entry.reduce_group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
            entry.needs_dp_avg = False
    return models
