"""The layers of a model as Megatron's arguments give them: of which kind, on which pipeline stage.

A layer is a letter, as in `--hybrid-layer-pattern`. A layer of a GPT model is two of them:
attention and what follows it.
"""

import argparse
from dataclasses import dataclass

from megatron_nsp.mcore.spec import layer_window

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


def has_experts(args: argparse.Namespace) -> list[bool]:
    """Which layers of a GPT model have experts, as `--moe-layer-freq` says."""
    if not args.num_experts:
        return [False] * args.num_layers
    if isinstance(args.moe_layer_freq, int):  # one layer in so many, the first among them
        return [layer % args.moe_layer_freq == 0 for layer in range(args.num_layers)]
    return [kind == 1 for kind in args.moe_layer_freq]


def layers_of_stages(args: argparse.Namespace) -> list[str]:
    """The layers of each pipeline stage: equal shares where the arguments say nothing else."""
    stages = args.pipeline_model_parallel_size
    pattern = args.hybrid_layer_pattern
    if pattern is not None and "|" in pattern:
        return list(pattern.split("|"))
    if pattern is not None:
        size = -(-len(pattern) // stages)
        return [pattern[size * stage : size * (stage + 1)] for stage in range(stages)]
    layers = [
        ATTENTION_LAYERS[0] + (EXPERT_LAYER if is_moe else MLP_LAYER)
        for is_moe in has_experts(args)
    ]
    parts, start = [], 0
    for size in stage_sizes(args):
        parts.append("".join(layers[start : start + size]))
        start += size
    return parts


def stage_sizes(args: argparse.Namespace) -> list[int]:
    """How many layers each pipeline stage has."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    given = [layers for layers in (first, last) if layers is not None]
    others = args.pipeline_model_parallel_size - len(given)
    rest = -(-(args.num_layers - sum(given)) // others) if others > 0 else 0
    ends = ([] if first is None else [first]), ([] if last is None else [last])
    return [*ends[0], *[rest] * others, *ends[1]]


@dataclass(frozen=True)
class LayerCounts:
    """How many layers of each kind the planner counts, over all pipeline stages.

    The stage that takes longest sets the pace of a pipeline, so every stage is counted as that one:
    with as much attention as the stage that has most, and with the MLPs and experts of the stage
    where a token passes through most of them.

    Attributes:
        attention: layers with attention.
        mlps: MLPs that every token passes through.
        experts: layers with experts.
    """

    attention: int
    mlps: int
    experts: int

    @classmethod
    def of(cls, args: argparse.Namespace, mlp_width: int, expert_width: int) -> "LayerCounts":
        """Counts the layers of a model.

        Args:
            args: Megatron's arguments.
            mlp_width: width of an MLP.
            expert_width: width of all experts that a token passes through in a layer.
        """
        stages = layers_of_stages(args)
        widest = max(
            stages,
            key=lambda s: s.count(MLP_LAYER) * mlp_width + s.count(EXPERT_LAYER) * expert_width,
        )
        attention = max(sum(stage.count(kind) for kind in ATTENTION_LAYERS) for stage in stages)
        mlps, experts = widest.count(MLP_LAYER), widest.count(EXPERT_LAYER)
        return cls(len(stages) * attention, len(stages) * mlps, len(stages) * experts)


def layer_windows(args: argparse.Namespace) -> list[int]:
    """The window of every layer that has one: most tokens before itself that a token sees."""
    pattern = hybrid_layers(args) or ATTENTION_LAYERS[0] * args.num_layers
    windows = [
        layer_window(args, number)
        for number, kind in enumerate(pattern, 1)
        if kind in ATTENTION_LAYERS
    ]
    return [window for window in windows if window is not None]


def recomputed_layers(args: argparse.Namespace) -> int:
    """Layers whose attention a backward pass runs again, on the pipeline stage that has most."""
    # Megatron's validation turns the first into the second, and removes it.
    is_selective = getattr(args, "recompute_activations", False)
    granularity = "selective" if is_selective else args.recompute_granularity
    largest_stage = max(stage_sizes(args))
    if granularity == "selective":
        modules = args.recompute_modules or ["core_attn"]
        return largest_stage if "core_attn" in modules else 0
    if granularity == "full" and args.recompute_method == "block":
        return min(largest_stage, args.recompute_num_layers or 0)
    return largest_stage if granularity == "full" else 0


def recomputed(args: argparse.Namespace) -> str:
    """What a backward pass runs again, as the cost model calls it."""
    if recomputed_layers(args) == 0:
        return "none"
    return "full" if args.recompute_granularity == "full" else "attention"


def recompute_share(args: argparse.Namespace) -> float:
    """Share of the layers of a pipeline stage that it runs again."""
    return recomputed_layers(args) / max(stage_sizes(args))
