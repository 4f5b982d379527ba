"""FP8 and FP4: what Transformer Engine's linear layers ask of the rows of a buffer.

A matrix product in FP8 takes rows in multiples of a block, so buffers are filled up to one. Filler
rows are rows of zeros from the embedding on: what scales a tensor is its largest element, and what
fills a buffer must not set it. Biases and learned positions, where a model has them, still do.
Attention stays in 16 bits, as it does in Megatron unless its own attention module is asked for FP8.
"""

import argparse
from collections.abc import Callable

from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor, nn

FILLER_TOKEN = -1
"""Token of filler rows that are to be zeros: outside every rank's part of the vocabulary."""


def block_rows(args: argparse.Namespace) -> int:
    """The multiple of rows that linear layers take: 1 where they run in 16 or 32 bits."""
    if args.fp8:
        return int(get_fp8_align_size(args.fp8_recipe))
    return int(get_fp4_align_size(args.fp4_recipe)) if args.fp4 else 1


def embed_fillers_as_zeros(models: list[nn.Module]) -> list[nn.Module]:
    """Lets embeddings take the filler token, whose row is zeros; a pre-wrap hook."""
    for model in models:
        for module in model.modules():
            # Split over several ranks, an embedding gives zeros for what no rank has by itself.
            if isinstance(module, VocabParallelEmbedding) and module.tp_group.size() == 1:
                module.forward = _with_zero_rows(module.forward)
    return models


def _with_zero_rows(embed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(tokens: Tensor) -> Tensor:
        is_filler = tokens == FILLER_TOKEN
        rows = embed(tokens.masked_fill(is_filler, 0))
        return rows.masked_fill(is_filler.unsqueeze(-1), 0.0)

    return forward
