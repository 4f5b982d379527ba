"""Layer specs with nested core attention: Megatron's own specs with one module exchanged."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_nsp.attention import Layer, nested_attention
from megatron_nsp.kernels import AttentionMask
from megatron_nsp.mcore.params import NestedSeqParams


def output_stays(config: Any) -> bool:
    """Whether the output projection holds on to attention's output until it is recomputed.

    It does where attention alone is recomputed, unless Megatron moves the projection's input to the
    host and frees it on the device.

    Args:
        config: Megatron's transformer configuration, or its arguments, which have the same names.
    """
    offloaded = config.offload_modules if config.fine_grained_activation_offloading else ()
    return config.recompute_granularity == "selective" and "attn_proj" not in offloaded


class NestedCoreAttention(MegatronModule):
    """Core attention that runs the plan of the micro-batch; it has no parameters and no state.

    The arguments are those Megatron builds a core attention with.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        """Refuses what nested attention does not compute."""
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type not in (
            AttnMaskType.causal,
            AttnMaskType.padding_causal,
        ):
            raise ValueError(
                f"nested attention is causal self attention, got {attention_type} attention with "
                f"mask {attn_mask_type}"
            )
        scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.softmax_scale = config.kv_channels**-0.5 if scale is None else float(scale)
        self.layer_number = layer_number
        self.output_stays = output_stays(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: NestedSeqParams | None = None,
    ) -> Tensor:
        """Attends within each sample.

        Args:
            query: `[T, 1, H, D]`.
            key: `[T, 1, K, D]`.
            value: `[T, 1, K, D]`.
            attention_mask: None; the mask follows from the plan.
            attn_mask_type: ignored, checked when the module is built.
            attention_bias: None.
            packed_seq_params: the micro-batch.

        Returns:
            `[T, 1, H * D]`.
        """
        assert isinstance(packed_seq_params, NestedSeqParams), f"{type(packed_seq_params)=}"
        assert attention_mask is None and attention_bias is None
        assert packed_seq_params.nested is not None and packed_seq_params.runtime is not None
        out_THD = nested_attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packed_seq_params.nested,
            AttentionMask(self.softmax_scale),
            packed_seq_params.runtime,
            layer=Layer(self.layer_number, self.training, self.output_stays),
        )
        return out_THD.flatten(1).unsqueeze(1)


def exchange_core_attention(spec: Any) -> Any:
    """Puts nested attention into every self-attention of a Megatron spec and returns the spec.

    Works on a layer spec and on the list of layer specs of a block, whatever model they are for.

    Raises:
        ValueError: the spec holds no self-attention.
    """
    layers = getattr(spec, "layer_specs", None)
    count = 0
    for layer in [spec] if layers is None else layers:
        attention = getattr(layer.submodules, "self_attention", None)
        submodules = getattr(attention, "submodules", None)
        if submodules is not None and hasattr(submodules, "core_attention"):
            submodules.core_attention = NestedCoreAttention
            count += 1
    if not count and layers != []:  # a pipeline stage may hold no layer at all
        raise ValueError("the layer spec holds no self-attention to exchange")
    return spec


def nested_spec(make_spec: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes a Megatron spec into one with nested attention."""

    def make_nested_spec(config: Any, vp_stage: int | None = None) -> Any:
        return exchange_core_attention(make_spec(config, vp_stage))

    return make_nested_spec
