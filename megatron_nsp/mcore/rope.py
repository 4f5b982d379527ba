"""Rotary embedding by token position.

Megatron asks its rotary module for a length (`get_rotary_seq_len`) and gives that length back to
`forward`, with nothing in between. Here the "length" is the tensor of positions, so that forward
returns one row a token and the module keeps no state.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor, nn

from megatron_nsp.mcore.packed_seq_params import NestedSeqParams


class NestedRotaryEmbedding(nn.Module):
    """Takes the place of a `rotary_pos_emb`.

    Args:
        inner: the module it replaces; its frequencies are used as they are.
        is_latent: whether latent attention owns it, whose queries come without a batch dimension.

    Raises:
        ValueError: the inner module is neither a RotaryEmbedding nor a YarnRotaryEmbedding.
    """

    def __init__(self, inner: nn.Module, is_latent: bool = False) -> None:
        """Keeps the inner module's frequencies."""
        super().__init__()
        if type(inner) not in (RotaryEmbedding, YarnRotaryEmbedding):
            raise ValueError(
                f"--position-embedding-type must be rope or yarn, got {type(inner).__name__}"
            )
        assert isinstance(inner.inv_freq, Tensor)
        self.inv_freq: Tensor = inner.inv_freq
        self.scale = 1.0 / float(inner.seq_len_interpolation_factor or 1.0)  # type: ignore[arg-type]
        self.rotary_interleaved = inner.rotary_interleaved
        self.concentration: float | None = None
        """YaRN's factor of sines and cosines, which Megatron expects beside the angles."""
        if isinstance(inner, YarnRotaryEmbedding):
            rows, self.concentration = inner.get_emb(2)
            self.inv_freq, self.scale = rows[1, 0, 0].chunk(2)[0], 1.0  # the angles of position 1
        self.is_latent = is_latent

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

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, float]:
        """The angles of each token, float32, and YaRN's concentration where it is YaRN's.

        The angles are `[T, 1, 1, rotary dim]`, or `[T, 1, rotary dim]` for latent attention.
        """
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(self.inv_freq.dtype) * self.scale, self.inv_freq)
        if self.rotary_interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        rows = angles[:, None, :] if self.is_latent else angles[:, None, None, :]
        return rows if self.concentration is None else (rows, self.concentration)


def use_positions(models: list[nn.Module]) -> list[nn.Module]:
    """Replaces the rotary modules of models and of their latent attention; a pre-wrap hook."""
    for model in models:
        for module in list(model.modules()):
            inner = getattr(module, "rotary_pos_emb", None)
            if isinstance(inner, nn.Module):
                is_latent = isinstance(module, MultiLatentAttention)
                module.rotary_pos_emb = NestedRotaryEmbedding(inner, is_latent)
    return models
