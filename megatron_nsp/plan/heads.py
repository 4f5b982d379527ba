"""Heads of an attention layer, and which degrees can divide them."""

from typing import NamedTuple


class HeadShape(NamedTuple):
    """Heads of one attention layer on one tensor-parallel rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


def is_admissible(degree: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether Ulysses can split this many heads over `degree` ranks.

    Query heads must divide. Key/value heads must divide, or each serve a whole number of ranks.

    Args:
        degree: ranks of the node.
        num_heads: query heads on a tensor-parallel rank.
        num_kv_heads: key/value heads on a tensor-parallel rank.
    """
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)
