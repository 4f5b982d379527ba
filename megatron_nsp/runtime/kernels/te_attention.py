"""Transformer Engine's attention module as its users here make it."""

from transformer_engine.pytorch import DotProductAttention


def attention_module(
    num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, softmax_scale: float
) -> DotProductAttention:
    """TE's attention of causal samples one after the other, without dropout.

    Args:
        num_heads: query heads of the rank.
        num_kv_heads: key/value heads.
        head_dim: head dim of queries and keys.
        value_dim: that of values.
        softmax_scale: factor of the scores.
    """
    return DotProductAttention(
        num_heads,
        (head_dim, value_dim),
        num_gqa_groups=num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=softmax_scale,
    )
