"""Small Megatron datasets for tests: random bytes, a document of each given length."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_documents(prefix: Path, lengths: Sequence[int], seed: int) -> None:
    """Writes `prefix`.bin and `prefix`.idx with uint8 tokens below 255.

    Args:
        prefix: path without ending.
        lengths: tokens of each document; 0 is allowed.
        seed: seed of the tokens.
    """
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint8)
    for length in lengths:
        tokens = rng.integers(0, 255, length).astype(np.uint8)
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")
