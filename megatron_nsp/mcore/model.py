"""The model: Megatron's own configuration with nested attention and rotary by position."""

import argparse
from dataclasses import replace
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.gpt import default_layer_spec

from megatron_nsp.cost.models import Model
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.mcore import mtp
from megatron_nsp.mcore.layers import LayerCounts, layer_windows, recomputed_layers
from megatron_nsp.mcore.moe.figures import add_up_over_domain
from megatron_nsp.mcore.quantized import block_rows, embed_fillers_as_zeros
from megatron_nsp.mcore.rope import use_positions
from megatron_nsp.mcore.spec import exchange_core_attention, nested_spec, output_stays
from megatron_nsp.plan.saving import SavedSizes


def model_config(args: argparse.Namespace) -> Any:
    """Megatron's configuration of the model of validated arguments, with nested attention.

    A HybridModelConfig where `--hybrid-layer-pattern` is set, a GPTModelConfig otherwise.
    """
    # Micro-batches differ in what stages send. Set here, because Megatron resets it while it
    # validates arguments, and only where it matters: it asks for a MoE dispatcher without MoE too.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    is_hybrid = args.hybrid_layer_pattern is not None
    config = hybrid_config_from_args(args) if is_hybrid else gpt_config_from_args(args)
    spec = config.hybrid_stack_spec if is_hybrid else config.transformer_layer_spec
    if is_hybrid:
        config.hybrid_stack_spec = exchange_core_attention(spec or hybrid_stack())
    else:
        config.transformer_layer_spec = nested_spec(spec or default_layer_spec)
    config.pre_wrap_hooks += [use_positions, add_up_over_domain]
    if block_rows(args) > 1:
        config.pre_wrap_hooks.append(embed_fillers_as_zeros)
    if args.mtp_num_layers:
        mtp.install()
    return config


def hybrid_stack() -> Any:
    """Megatron's stack of a hybrid model, copied down to what is exchanged in it."""
    stack = hybrid_stack_spec.submodules
    experts = stack.moe_layer
    layers = {"moe_layer": replace(experts, submodules=replace(experts.submodules))}
    for name in ("attention_layer", "mla_layer"):
        layer = getattr(stack, name)
        attention = layer.submodules.self_attention
        attention = replace(attention, submodules=replace(attention.submodules))
        submodules = replace(layer.submodules, self_attention=attention)
        layers[name] = replace(layer, submodules=submodules)
    return replace(hybrid_stack_spec, submodules=replace(stack, **layers))


def model_of(args: argparse.Namespace) -> Model:
    """The model that validated Megatron arguments describe."""
    is_latent, heads = args.multi_latent_attention, args.num_attention_heads
    windows = layer_windows(args)
    expert_hidden = args.moe_ffn_hidden_size or args.ffn_hidden_size
    shared_width = args.moe_shared_expert_intermediate_size or 0
    counts = LayerCounts.of(args, expert_hidden * args.moe_router_topk + shared_width)
    return Model(
        name="this model",
        source="Megatron's arguments",
        num_layers=counts.attention,
        hidden=args.hidden_size,
        num_heads=heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else heads,
        head_dim=args.qk_head_dim + args.qk_pos_emb_head_dim if is_latent else args.kv_channels,
        ffn_hidden=counts.mlp_width,
        vocab_size=args.padded_vocab_size,
        num_mlps=counts.mlps,
        num_experts=args.num_experts or 0,
        num_expert_layers=counts.experts,
        expert_hidden=expert_hidden,
        top_k=args.moe_router_topk,
        shared_width=shared_width,
        is_gated=args.swiglu,
        is_tied=not args.untie_embeddings_and_output_weights,
        num_outputs=1 + (args.mtp_num_layers or 0),
        value_dim=args.v_head_dim if is_latent else None,
        projections=latent_projections(args) if is_latent else None,
        num_windowed_layers=len(windows),
        window_left=max(windows, default=0),
    )


def latent_projections(args: argparse.Namespace) -> int:
    """Parameters of one layer's projections in latent attention."""
    hidden, heads, rank = args.hidden_size, args.num_attention_heads, args.kv_lora_rank
    query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    compressed = args.q_lora_rank
    parameters = hidden * query if compressed is None else compressed * (hidden + query)
    parameters += hidden * (rank + args.qk_pos_emb_head_dim)
    parameters += rank * heads * (args.qk_head_dim + args.v_head_dim)
    return int(parameters + heads * args.v_head_dim * hidden)


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
