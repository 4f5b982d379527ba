"""The model: Megatron's own configuration with nested attention and rotary by position."""

import argparse
from typing import Any

from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import default_layer_spec

from megatron_nsp.mcore.rope import use_positions
from megatron_nsp.mcore.spec import nested_spec
from megatron_nsp.mcore.validate import heads_per_rank
from megatron_nsp.planner.cost import ModelShape


def gpt_config(args: argparse.Namespace) -> Any:
    """Megatron's GPTModelConfig of validated arguments, with nested attention."""
    # Micro-batches differ in what stages send. Set here, because Megatron resets it while it
    # validates arguments, and only where it matters: it asks for a MoE dispatcher without MoE too.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    config = gpt_config_from_args(args)
    config.transformer_layer_spec = nested_spec(config.transformer_layer_spec or default_layer_spec)
    config.pre_wrap_hooks.append(use_positions)
    return config


def model_shape(args: argparse.Namespace, bytes_per_element: int) -> ModelShape:
    """What the planner needs to know of a model, as one tensor- and pipeline-parallel rank sees it.

    The width of an MLP is the one a token passes through: of a MoE layer the routed and shared
    experts. A gated MLP has three matrices, another two.

    Args:
        args: validated Megatron arguments.
        bytes_per_element: size of an element in an all-to-all.
    """
    heads, kv_heads = heads_per_rank(args)
    tp = args.tensor_model_parallel_size
    ffn_hidden = args.ffn_hidden_size
    if args.num_experts:
        ffn_hidden = args.moe_router_topk * (args.moe_ffn_hidden_size or args.ffn_hidden_size)
        ffn_hidden += args.moe_shared_expert_intermediate_size or 0
    num_matrices = 3 if args.swiglu else 2
    projections = 2 * args.hidden_size * (2 * heads + 2 * kv_heads) * args.kv_channels
    mlp = 2 * num_matrices * args.hidden_size * ffn_hidden // tp
    return ModelShape(
        num_layers=args.num_layers // args.pipeline_model_parallel_size,
        hidden=args.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=args.kv_channels,
        dense_flops_per_token=float(projections + mlp),
        bytes_per_element=bytes_per_element,
    )
