"""Megatron's layer specs made of TE modules carry our core attention."""

import pytest
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

from megatron_nsp.mcore.spec import NestedCoreAttention, exchange_core_attention


def test_te_is_what_megatron_uses() -> None:
    assert HAVE_TE


@pytest.mark.parametrize("options", [{}, {"num_experts": 4, "moe_grouped_gemm": True}])
def test_a_te_layer_carries_nested_attention(options: dict) -> None:
    spec = get_gpt_layer_with_transformer_engine_spec(**options)
    attention = spec.submodules.self_attention.submodules
    assert attention.core_attention is TEDotProductAttention
    others = {name: value for name, value in vars(attention).items() if name != "core_attention"}
    assert exchange_core_attention(spec) is spec
    assert attention.core_attention is NestedCoreAttention
    assert others == {
        name: value for name, value in vars(attention).items() if name != "core_attention"
    }
    assert any(value.__name__.startswith("TE") for value in others.values() if value)


def test_the_default_spec_of_a_block_does_too() -> None:
    """What the training loop asks for on a GPU: a block's layers, from its configuration."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2
    )
    block = exchange_core_attention(
        get_gpt_decoder_block_spec(config, use_transformer_engine=True, pp_rank=0)
    )
    found = [
        layer.submodules.self_attention.submodules.core_attention for layer in block.layer_specs
    ]
    assert found == [NestedCoreAttention] * 2
