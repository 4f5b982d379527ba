"""Rotary embedding by token position.

Megatron asks its rotary module for a length (`get_rotary_seq_len`) and gives that length back to
`forward`, with nothing in between. Here the "length" is the tensor of positions, so that forward
returns one row a token and the module keeps no state.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megatron_nsp.mcore.params import NestedSeqParams


class NestedRotaryEmbedding(nn.Module):
    """Takes the place of a model's `rotary_pos_emb`.

    Args:
        inner: the module it replaces; its frequencies are used as they are.

    Raises:
        ValueError: the inner module is not a plain RotaryEmbedding.
    """

    def __init__(self, inner: nn.Module) -> None:
        """Keeps the inner module's frequencies."""
        super().__init__()
        if type(inner) is not RotaryEmbedding:
            raise ValueError(f"--position-embedding-type must be rope, got {type(inner).__name__}")
        assert isinstance(inner.inv_freq, Tensor)
        self.inv_freq: Tensor = inner.inv_freq
        self.scale = 1.0 / float(inner.seq_len_interpolation_factor or 1.0)  # type: ignore[arg-type]
        self.rotary_interleaved = inner.rotary_interleaved

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """The positions of the micro-batch, which Megatron hands on to `forward`."""
        assert isinstance(packed_seq_params, NestedSeqParams), f"{type(packed_seq_params)=}"
        assert packed_seq_params.positions is not None
        return packed_seq_params.positions

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        """`[T, 1, 1, rotary dim]` the angles of each token, float32."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(self.inv_freq.dtype) * self.scale, self.inv_freq)
        if self.rotary_interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]


def use_positions(models: list[nn.Module]) -> list[nn.Module]:
    """Replaces the rotary module of every model that has one; a Megatron pre-wrap hook."""
    for model in models:
        inner = getattr(model, "rotary_pos_emb", None)
        if isinstance(inner, nn.Module):
            model.rotary_pos_emb = NestedRotaryEmbedding(inner)
    return models
