"""The model: Megatron's own configuration with nested attention and rotary by position."""

import argparse
from dataclasses import replace
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.gpt import default_layer_spec

from megatron_nsp.cost.models import Model
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.mcore.check_layers import ATTENTION_LAYERS, hybrid_layers, hybrid_stages
from megatron_nsp.mcore.rope import use_positions
from megatron_nsp.mcore.spec import (
    exchange_core_attention,
    layer_window,
    nested_spec,
    output_stays,
)
from megatron_nsp.plan.saving import SavedSizes


def model_config(args: argparse.Namespace) -> Any:
    """Megatron's configuration of the model of validated arguments, with nested attention.

    A HybridModelConfig where `--hybrid-layer-pattern` is set, a GPTModelConfig otherwise.

    Raises:
        ValueError: `--spec` cannot be imported, or the model's modules are not installed.
    """
    # Micro-batches differ in what stages send. Set here, because Megatron resets it while it
    # validates arguments, and only where it matters: it asks for a MoE dispatcher without MoE too.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    is_hybrid = args.hybrid_layer_pattern is not None
    config = hybrid_config_from_args(args) if is_hybrid else gpt_config_from_args(args)
    spec = config.hybrid_stack_spec if is_hybrid else config.transformer_layer_spec
    if spec is None and args.spec is not None:
        raise ValueError(f"--spec {' '.join(args.spec)} cannot be imported")
    if not is_hybrid:
        config.transformer_layer_spec = nested_spec(spec or default_layer_spec)
    elif spec is None and not HAVE_TE:
        raise ValueError(
            "--hybrid-layer-pattern needs Transformer Engine, which is not installed, or --spec "
            "with a stack of other modules"
        )
    else:
        config.hybrid_stack_spec = exchange_core_attention(spec or hybrid_stack())
    config.pre_wrap_hooks.append(use_positions)
    return config


def hybrid_stack() -> Any:
    """Megatron's stack of a hybrid model, copied down to what is exchanged in it."""
    stack, layers = hybrid_stack_spec.submodules, {}
    for name in ("attention_layer", "mla_layer"):
        layer = getattr(stack, name)
        attention = layer.submodules.self_attention
        attention = replace(attention, submodules=replace(attention.submodules))
        submodules = replace(layer.submodules, self_attention=attention)
        layers[name] = replace(layer, submodules=submodules)
    return replace(hybrid_stack_spec, submodules=replace(stack, **layers))


def model_of(args: argparse.Namespace) -> Model:
    """The model that validated Megatron arguments describe."""
    is_moe, is_latent = bool(args.num_experts), args.multi_latent_attention
    heads = args.num_attention_heads
    windows = layer_windows(args)
    layers, mlps, experts = layer_counts(args)
    ffn_hidden, shared_width = args.ffn_hidden_size * mlps, 0
    if is_moe:
        shared_width = (args.moe_shared_expert_intermediate_size or 0) * experts + ffn_hidden
        ffn_hidden = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * experts
    return Model(
        name="this model",
        source="Megatron's arguments",
        num_layers=layers,
        hidden=args.hidden_size,
        num_heads=heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else heads,
        head_dim=args.qk_head_dim + args.qk_pos_emb_head_dim if is_latent else args.kv_channels,
        ffn_hidden=ffn_hidden // layers,
        vocab_size=args.padded_vocab_size,
        num_experts=args.num_experts or 0,
        top_k=args.moe_router_topk,
        shared_width=shared_width // layers,
        is_gated=args.swiglu,
        is_tied=not args.untie_embeddings_and_output_weights,
        value_dim=args.v_head_dim if is_latent else None,
        projections=latent_projections(args) if is_latent else None,
        num_windowed_layers=len(windows),
        window_left=max(windows, default=0),
    )


def layer_windows(args: argparse.Namespace) -> list[int]:
    """The window of every layer that has one: most tokens before itself that a token sees."""
    pattern = hybrid_layers(args) or ATTENTION_LAYERS[0] * args.num_layers
    windows = [
        layer_window(args, number)
        for number, kind in enumerate(pattern, 1)
        if kind in ATTENTION_LAYERS
    ]
    return [window for window in windows if window is not None]


def layer_counts(args: argparse.Namespace) -> tuple[int, int, int]:
    """Layers with attention, with an MLP and with experts.

    Stages of a hybrid model may hold unequal shares of a kind: each kind is counted as if all
    stages had as many as the one with most.
    """
    if args.hybrid_layer_pattern is None:
        experts = args.num_layers if args.num_experts else 0
        return args.num_layers, args.num_layers - experts, experts
    stages = hybrid_stages(args)
    layers, mlps, experts = (
        len(stages) * max(sum(stage.count(kind) for kind in kinds) for stage in stages)
        for kinds in (ATTENTION_LAYERS, "-", "E")
    )
    return layers, mlps, experts


def latent_projections(args: argparse.Namespace) -> int:
    """Parameters of one layer's projections in latent attention."""
    hidden, heads, rank = args.hidden_size, args.num_attention_heads, args.kv_lora_rank
    query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    compressed = args.q_lora_rank
    parameters = hidden * query if compressed is None else compressed * (hidden + query)
    parameters += hidden * (rank + args.qk_pos_emb_head_dim)
    parameters += rank * heads * (args.qk_head_dim + args.v_head_dim)
    return int(parameters + heads * args.v_head_dim * hidden)


def recomputed(args: argparse.Namespace) -> str:
    """What a backward pass runs again: one of `config.RECOMPUTE`."""
    if recomputed_layers(args) == 0:
        return "none"
    return "full" if args.recompute_granularity == "full" else "selective"


def recompute_share(args: argparse.Namespace) -> float:
    """Share of the layers of a pipeline stage that it runs again."""
    return recomputed_layers(args) / _stage_layers(args)


def recomputed_layers(args: argparse.Namespace) -> int:
    """Layers whose attention a backward pass runs again, on the pipeline stage that has most."""
    # Megatron's validation turns the first into the second.
    is_selective = getattr(args, "recompute_activations", False)
    granularity = "selective" if is_selective else args.recompute_granularity
    if granularity == "selective":
        modules = args.recompute_modules or ["core_attn"]
        return _stage_layers(args) if "core_attn" in modules else 0
    if granularity == "full" and args.recompute_method == "block":
        return min(_stage_layers(args), args.recompute_num_layers or 0)
    return _stage_layers(args) if granularity == "full" else 0


def _stage_layers(args: argparse.Namespace) -> int:
    """Layers of the pipeline stage that has most."""
    ends = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    given = [layers for layers in ends if layers is not None]
    others = args.pipeline_model_parallel_size - len(given)
    rest = -(-(args.num_layers - sum(given)) // others) if others > 0 else 0
    return int(max([*given, rest]))


def saved_sizes(args: argparse.Namespace, shape: ModelShape) -> SavedSizes:
    """The sizes of what a rank saves of a token's attention output.

    Where attention alone is recomputed, the output projection holds the output anyway.

    Args:
        args: validated Megatron arguments.
        shape: the model.
    """
    num_layers = recomputed_layers(args)
    if args.hybrid_layer_pattern is not None:  # not all of its layers have attention
        num_layers = min(num_layers, shape.num_layers)
    sizes = replace(shape.saved_sizes, num_layers=num_layers)
    return replace(sizes, row_bytes=0) if output_stays(args) else sizes


def model_shape(args: argparse.Namespace, bytes_per_element: int) -> ModelShape:
    """What the planner needs to know of a model, as one rank sees it.

    Args:
        args: validated Megatron arguments.
        bytes_per_element: size of an element in an all-to-all.
    """
    return model_of(args).shape(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
        bytes_per_element,
    )
