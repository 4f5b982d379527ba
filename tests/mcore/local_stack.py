"""A stack for hybrid models out of Megatron's own modules, which run without Transformer Engine.

    --hybrid-layer-pattern *-*- --spec tests.mcore.local_stack SPEC

Megatron ships stacks of Transformer Engine modules only. `spec` is for RMSNorm, as in MODEL.
"""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


class LocalStack(HybridStack):
    """Megatron's stack, whose last norm is always one of Transformer Engine's."""

    def __init__(self, config: Any, submodules: Any, **how: Any) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **how)
        if self.post_process:
            self.post_layer_norm = True
            eps = config.layernorm_epsilon
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, eps=eps)


def attention_layer(is_latent: bool) -> ModuleSpec:
    """The attention half of Megatron's local layer."""
    layer = get_gpt_layer_local_submodules(
        normalization="RMSNorm", multi_latent_attention=is_latent, qk_layernorm=is_latent
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def mlp_layer(module: type, num_experts: int | None) -> ModuleSpec:
    """The other half."""
    layer = get_gpt_layer_local_submodules(normalization="RMSNorm", num_experts=num_experts)
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
    )
    return ModuleSpec(module=module, submodules=submodules)


SPEC = ModuleSpec(
    module=LocalStack,
    submodules=HybridStackSubmodules(
        attention_layer=attention_layer(is_latent=False),
        mla_layer=attention_layer(is_latent=True),
        mlp_layer=mlp_layer(MLPLayer, None),
        moe_layer=mlp_layer(MoETransformerLayer, 4),
    ),
)
