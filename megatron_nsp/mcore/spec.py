"""Layer specs with nested core attention and routing: Megatron's own with modules exchanged."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor

from megatron_nsp.mcore.moe.layer import exchange_experts
from megatron_nsp.mcore.packed_seq_params import NestedSeqParams
from megatron_nsp.runtime.attention import Layer, nested_attention
from megatron_nsp.runtime.kernels import AttentionMask

# Mask of a core attention -> whether a token sees what comes after it in its sample. Padding is no
# matter here: buffers hold none but filler tokens, which are samples of their own.
_IS_CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,
    AttnMaskType.no_mask: False,
    AttnMaskType.padding: False,
}


def layer_window(config: Any, layer_number: int) -> int | None:
    """Most tokens before itself that a token sees in a layer; None = all of them.

    Args:
        config: Megatron's transformer configuration, or its arguments, whose window is
            checked (`refusals.py`).
        layer_number: number of the layer in the whole model, from 1.
    """
    window, skip = config.window_size, config.window_attn_skip_freq
    if not is_layer_window_attention(window, skip, layer_number) or window[0] < 0:
        return None
    return int(window[0])


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
    """Core attention that runs the plan of the micro-batch; it keeps no state.

    The arguments are those Megatron builds a core attention with. Like Megatron's own it has one
    parameter at most, the sinks of `--softmax-type learnable`: `softmax_offset`, one for each head
    of this tensor-parallel rank, under the same name in checkpoints.

    Query-key layer scaling changes nothing here: Megatron divides scores by the layer's number and
    multiplies them by it again in float32, which is what kernels hold scores in.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """Refuses what nested attention does not compute."""
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type not in _IS_CAUSAL:
            raise ValueError(
                f"nested attention is causal or full self attention, got {attention_type} "
                f"attention with mask {attn_mask_type}"
            )
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"--attention-dropout must be 0, got {dropout}")
        scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.layer_number = layer_number
        self.output_stays = output_stays(config)
        self.mask = AttentionMask(
            config.kv_channels**-0.5 if scale is None else float(scale),
            _IS_CAUSAL[attn_mask_type],
            layer_window(config, layer_number),
        )
        self.pg_collection = pg_collection
        self.softmax_offset: Tensor | None = None
        if config.softmax_type != "vanilla":
            self._make_sinks()

    def _make_sinks(self) -> None:
        groups, config = self.pg_collection, self.config
        if groups is None:
            groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
            self.pg_collection = groups
        size = divide(config.num_attention_heads, groups.tp.size())
        how = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(size, **how)
            return
        sinks = torch.nn.Parameter(torch.empty(size, **how))
        # Without the mark Megatron's gradient norm counts the heads of one rank alone.
        set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
        self.softmax_offset = sinks
        if config.perform_initialization:
            config.init_method(sinks)

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
            query: `[T, 1, H, D]`, from latent attention `[T, H, D]`.
            key: `[T, 1, K, D]` or `[T, K, D]`.
            value: `[T, 1, K, V]` or `[T, K, V]`.
            attention_mask: None; the mask follows from the plan.
            attn_mask_type: ignored, checked when the module is built.
            attention_bias: None.
            packed_seq_params: the micro-batch.

        Returns:
            `[T, 1, H * V]`.
        """
        assert isinstance(packed_seq_params, NestedSeqParams), f"{type(packed_seq_params)=}"
        assert attention_mask is None and attention_bias is None
        assert packed_seq_params.nested is not None and packed_seq_params.runtime is not None
        # Layers of multi-token prediction count from 1 again, and one may run at several depths.
        depth = packed_seq_params.depth
        number = self.config.num_layers + depth if depth else self.layer_number
        q_THD, k_TKD, v_TKV = (x.flatten(1, -2) if x.dim() == 4 else x for x in (query, key, value))
        out_THV = nested_attention(
            q_THD,
            k_TKD,
            v_TKV,
            packed_seq_params.nested,
            self.mask,
            packed_seq_params.runtime,
            self.softmax_offset,
            Layer(number, self.training, self.output_stays),
        )
        return out_THV.flatten(1).unsqueeze(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The sinks, cut over tensor-parallel ranks, where they are learnt; nothing otherwise."""
        if self.config.softmax_type != "learnable":
            return {}
        assert metadata is not None
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded


def exchange_core_attention(spec: Any) -> Any:
    """Puts nested attention into every self-attention of a Megatron spec and returns the spec.

    Experts get nested routing with it. Works on a layer spec, on the list of layer specs of a
    block, and on the stack of a hybrid model, whose kinds of layers it names one by one.

    Raises:
        ValueError: the spec holds no self-attention, or experts that cannot be exchanged.
    """
    layers = getattr(spec, "layer_specs", None)
    stack: Any = getattr(spec, "submodules", None)
    if layers is None and hasattr(stack, "attention_layer"):
        layers = [stack.attention_layer, stack.mla_layer]
        exchange_experts(stack.moe_layer)
    count = 0
    for layer in [spec] if layers is None else layers:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        submodules = getattr(attention, "submodules", None)
        if submodules is not None and hasattr(submodules, "core_attention"):
            submodules.core_attention = NestedCoreAttention
            count += 1
        exchange_experts(layer)
    if not count and layers != []:  # a pipeline stage may hold no layer at all
        raise ValueError("the layer spec holds no self-attention to exchange")
    return spec


def nested_spec(spec: Any) -> Callable[..., Any]:
    """Wraps a Megatron spec, or a function that makes one, into a function with nested attention.

    Args:
        spec: as `--spec` gives it: a spec, or a function of the configuration and, if it asks for
            it, of the virtual pipeline stage.
    """

    def make_nested_spec(config: Any, vp_stage: int | None = None) -> Any:
        if isinstance(spec, ModuleSpec) or not callable(spec):
            return exchange_core_attention(spec)
        takes_stage = "vp_stage" in inspect.signature(spec).parameters
        return exchange_core_attention(spec(config, *((vp_stage,) if takes_stage else ())))

    return make_nested_spec
