"""The model: Megatron's own configuration with nested attention and rotary by position."""

import argparse
from dataclasses import replace
from typing import Any

from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import default_layer_spec

from megatron_nsp.mcore.rope import use_positions
from megatron_nsp.mcore.spec import nested_spec, output_stays
from megatron_nsp.planner.cost import ModelShape
from megatron_nsp.planner.models import Model
from megatron_nsp.planner.saving import kept_output
from megatron_nsp.recompute import KeptOutput


def gpt_config(args: argparse.Namespace) -> Any:
    """Megatron's GPTModelConfig of validated arguments, with nested attention."""
    # Micro-batches differ in what stages send. Set here, because Megatron resets it while it
    # validates arguments, and only where it matters: it asks for a MoE dispatcher without MoE too.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    config = gpt_config_from_args(args)
    config.transformer_layer_spec = nested_spec(config.transformer_layer_spec or default_layer_spec)
    config.pre_wrap_hooks.append(use_positions)
    return config


def model_of(args: argparse.Namespace) -> Model:
    """The model that validated Megatron arguments describe."""
    is_moe = bool(args.num_experts)
    heads = args.num_attention_heads
    return Model(
        name="this model",
        source="Megatron's arguments",
        num_layers=args.num_layers,
        hidden=args.hidden_size,
        num_heads=heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else heads,
        head_dim=args.kv_channels,
        ffn_hidden=(args.moe_ffn_hidden_size if is_moe else None) or args.ffn_hidden_size,
        vocab_size=args.padded_vocab_size,
        num_experts=args.num_experts or 0,
        top_k=args.moe_router_topk,
        shared_width=(args.moe_shared_expert_intermediate_size or 0) if is_moe else 0,
        is_gated=args.swiglu,
        is_tied=not args.untie_embeddings_and_output_weights,
    )


def recomputed(args: argparse.Namespace) -> str:
    """What a backward pass runs again, as the cost model calls it.

    Layers in part (`--recompute-num-layers` below their number) count as none.
    """
    if recomputed_layers(args) < _stage_layers(args):
        return "none"
    return "full" if args.recompute_granularity == "full" else "attention"


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


def kept_by(args: argparse.Namespace, shape: ModelShape) -> KeptOutput:
    """What a rank keeps of the attention output of saved tokens.

    Where attention alone is recomputed, the output projection keeps the output anyway.

    Args:
        args: validated Megatron arguments.
        shape: the model.
    """
    output = replace(kept_output(shape), num_layers=recomputed_layers(args))
    return replace(output, row_bytes=0) if output_stays(args) else output


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
