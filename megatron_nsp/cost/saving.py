"""Attention outputs that are kept instead of recomputed, in the terms of the cost model."""

from dataclasses import replace

from megatron_nsp.config import MOST_TOKENS
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.saving import KeptOutput


def kept_output(shape: ModelShape) -> KeptOutput:
    """What all layers of a model keep of a saved token: its output and its LSE."""
    return KeptOutput(
        num_heads=shape.num_heads,
        row_bytes=shape.num_heads * shape.value_dim * shape.bytes_per_element,
        lse_bytes=8 if shape.bytes_per_element == 8 else 4,
        num_layers=shape.num_layers,
    )


def aware_of_saving(cost: CostModel, budget_bytes: float, output: KeptOutput) -> CostModel:
    """The cost model that plans for attention outputs of so many bytes being kept on each rank.

    Args:
        cost: a cost model.
        budget_bytes: most bytes that a rank may keep in a micro-batch; may be infinite.
        output: the sizes of what is kept; of at least one layer.
    """
    tokens = min(budget_bytes / output.bytes_per_token, MOST_TOKENS)
    return replace(cost, save_tokens=int(tokens))
