"""The layers of a model as Megatron's arguments give them: of which kind, on which pipeline stage.

A layer of a GPT model is attention and what follows it; a hybrid model counts the two apart, each a
letter of `--hybrid-layer-pattern`.
"""

import argparse
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.transformer.heterogeneous.heterogeneous_config import AttentionConfig, MLPConfig

from megatron_nsp.mcore.spec import layer_window
from megatron_nsp.mcore.stages import chunk_layers, chunk_sizes

ATTENTION_LAYERS = "*+"
"""How a hybrid layer pattern writes attention and latent attention."""

MLP_LAYER, EXPERT_LAYER = "-", "E"

LAYERS = ATTENTION_LAYERS + MLP_LAYER + EXPERT_LAYER
"""The layers that run on a part of a sample."""


def hybrid_layers(args: argparse.Namespace) -> str:
    """The layers of `--hybrid-layer-pattern`, a letter each; empty for a GPT model."""
    return (args.hybrid_layer_pattern or "").replace("|", "")


def set_hybrid_layers(args: argparse.Namespace) -> None:
    """Sets the arguments that `--hybrid-layer-pattern` decides, as Megatron does later."""
    if args.hybrid_layer_pattern is None:
        return
    args.num_layers = len(hybrid_layers(args))
    if "+" in args.hybrid_layer_pattern:
        args.multi_latent_attention = True


class Layer(NamedTuple):
    """What one layer does for a token.

    Attributes:
        has_attention: whether it has attention.
        mlp_width: width of its MLP; 0 = none.
        has_experts: whether it has experts.
    """

    has_attention: bool
    mlp_width: int
    has_experts: bool


def layers_of(args: argparse.Namespace) -> list[Layer]:
    """The layers of a model whose arguments Megatron has validated, in order."""
    if args.hybrid_layer_pattern is not None:
        return [_hybrid_layer(kind, args.ffn_hidden_size) for kind in hybrid_layers(args)]
    if args.heterogeneous_layers_config_encoded_json is not None:
        blocks = json.loads(args.heterogeneous_layers_config_encoded_json)["block_configs"]
        return [_own_layer(block, args) for block in blocks]
    return [
        Layer(True, 0 if is_moe else args.ffn_hidden_size, is_moe) for is_moe in _have_experts(args)
    ]


def _hybrid_layer(kind: str, mlp_width: int) -> Layer:
    return Layer(
        kind in ATTENTION_LAYERS, mlp_width if kind == MLP_LAYER else 0, kind == EXPERT_LAYER
    )


def _own_layer(block: dict[str, Any], args: argparse.Namespace) -> Layer:
    """A layer of `--heterogeneous-layers-config-path`, by what Megatron reads from it."""
    attention = AttentionConfig.build_config_from_dict(block, args.num_attention_heads)
    mlp = MLPConfig.build_config_from_dict(block, args.hidden_size)
    linear_width = args.hidden_size // (3 if args.swiglu else 2)  # one matrix in place of these
    width = 0 if mlp.no_op else linear_width if mlp.replace_with_linear else mlp.ffn_hidden_size
    if attention.replace_with_linear:
        width += linear_width
    return Layer(not (attention.no_op or attention.replace_with_linear), int(width), False)


def _have_experts(args: argparse.Namespace) -> list[bool]:
    """Which layers of a GPT model have experts, as `--moe-layer-freq` says."""
    if not args.num_experts:
        return [False] * args.num_layers
    if isinstance(args.moe_layer_freq, int):  # one layer in so many, the first among them
        return [layer % args.moe_layer_freq == 0 for layer in range(args.num_layers)]
    return [kind == 1 for kind in args.moe_layer_freq]


def mtp_layers(args: argparse.Namespace) -> list[Layer]:
    """The layers of multi-token prediction, one a depth: each like the model's last."""
    depths = args.mtp_num_layers or 0
    return layers_of(args)[-1:] * depths if depths else []


def layers_of_stages(args: argparse.Namespace) -> list[list[Layer]]:
    """The layers of each pipeline rank, those of all its chunks.

    Those of multi-token prediction are on the last one.
    """
    layers = layers_of(args)
    ranks = [[layers[place] for chunk in rank for place in chunk] for rank in chunk_layers(args)]
    ranks[-1] += mtp_layers(args)
    return ranks


@dataclass(frozen=True)
class LayerCounts:
    """How many layers of each kind the planner counts, over all pipeline stages.

    The stage that takes longest sets the pace of a pipeline, so every stage is counted as that one:
    with as much attention as the stage that has most, and with the MLPs and experts of the stage
    where a token passes through most of them.

    Attributes:
        attention: layers with attention.
        mlps: MLPs that every token passes through.
        mlp_width: their width, the rounded mean.
        experts: layers with experts.
    """

    attention: int
    mlps: int
    mlp_width: int
    experts: int

    @classmethod
    def of(cls, args: argparse.Namespace, expert_width: int) -> "LayerCounts":
        """Counts the layers of a model.

        Args:
            args: Megatron's arguments.
            expert_width: width of all experts that a token passes through in a layer.
        """
        stages = layers_of_stages(args)
        widest = max(
            stages,
            key=lambda stage: sum(
                each.mlp_width + each.has_experts * expert_width for each in stage
            ),
        )
        attention = max(sum(each.has_attention for each in stage) for stage in stages)
        widths = [each.mlp_width for each in widest if each.mlp_width]
        experts = sum(each.has_experts for each in widest)
        mean_width = round(sum(widths) / len(widths)) if widths else 0
        num_stages = len(stages)
        return cls(
            num_stages * attention, num_stages * len(widths), mean_width, num_stages * experts
        )


def layer_windows(args: argparse.Namespace) -> list[int]:
    """The window of every layer that has one: most tokens before itself that a token sees."""
    windows = [
        layer_window(args, number)
        for number, layer in enumerate(layers_of(args), 1)
        if layer.has_attention
    ]
    for depth in range(args.mtp_num_layers or 0):  # counted from 1 again
        windows.append(layer_window(args, 1 if args.mtp_use_repeated_layer else depth + 1))
    return [window for window in windows if window is not None]


def recomputed(args: argparse.Namespace) -> str:
    """What a backward pass runs again of attention, as the cost model calls it."""
    # Megatron's validation turns the first into the second, and removes it.
    is_selective = getattr(args, "recompute_activations", False)
    granularity = "selective" if is_selective else args.recompute_granularity
    if granularity == "selective":
        return granularity if "core_attn" in (args.recompute_modules or ["core_attn"]) else "none"
    is_block = args.recompute_method == "block"
    is_full = granularity == "full" and not (is_block and not args.recompute_num_layers)
    return "full" if is_full else "none"


def recomputed_layers(args: argparse.Namespace) -> int:
    """Layers whose attention a backward pass runs again, on the pipeline rank that has most."""
    how = recomputed(args)
    if how == "none":
        return 0
    if how == "full" and args.recompute_method == "block":
        # Of whole blocks Megatron recomputes no layer of multi-token prediction.
        of_chunk = args.recompute_num_layers
        return max(sum(min(size, of_chunk) for size in rank) for rank in chunk_sizes(args))
    return _largest_rank(args)


def _largest_rank(args: argparse.Namespace) -> int:
    """Layers of the pipeline rank that has most, those of multi-token prediction with them."""
    sizes = [sum(rank) for rank in chunk_sizes(args)]
    return max(*sizes, sizes[-1] + (args.mtp_num_layers or 0))


def recompute_share(args: argparse.Namespace) -> float:
    """Share of the layers of a pipeline rank that it runs again."""
    return recomputed_layers(args) / _largest_rank(args)
