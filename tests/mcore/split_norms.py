"""Megatron's own layers with norms that run on a tensor-parallel rank's part of the rows.

    --sequence-parallel --spec tests.mcore.split_norms layer_spec

Without Transformer Engine Megatron has none: its torch norm refuses sequence parallelism.
"""

from typing import Any

import torch
from megatron.training.models.gpt import default_layer_spec


class SplitNorm(torch.nn.RMSNorm):
    """An RMSNorm whose gradient tensor-parallel ranks add up."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def layer_spec(config: Any, vp_stage: int | None) -> Any:
    """The layers of one pipeline stage of a model with experts."""
    block = default_layer_spec(config, vp_stage)
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SplitNorm
    block.layer_norm = SplitNorm
    return block
