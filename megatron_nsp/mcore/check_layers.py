"""What a job can get wrong about the kinds of its layers: windows, latent attention, hybrid models.

Like `validate.py`, of which this is the part about layers: ValueError, one line, same on all ranks.
"""

import argparse

from megatron.core.models.backends import HAVE_APEX

ATTENTION_LAYERS = "*+"
"""How a hybrid layer pattern writes attention and latent attention."""

_HYBRID_LAYERS = ATTENTION_LAYERS + "-E|"


def hybrid_layers(args: argparse.Namespace) -> str:
    """The layers of `--hybrid-layer-pattern`, a letter each; empty for a GPT model."""
    return (args.hybrid_layer_pattern or "").replace("|", "")


def hybrid_stages(args: argparse.Namespace) -> list[str]:
    """The layers of each pipeline stage of a hybrid model: equal shares where | marks none."""
    pattern, stages = args.hybrid_layer_pattern, args.pipeline_model_parallel_size
    if "|" in pattern:
        return list(pattern.split("|"))
    size = -(-len(pattern) // stages)
    return [pattern[size * stage : size * (stage + 1)] for stage in range(stages)]


def check_hybrid(args: argparse.Namespace) -> None:
    """Refuses layers of a hybrid model that cannot run on a part of a sample.

    Mamba and gated delta layers carry state along a sequence, sparse attention picks keys of all of
    it, and multi-token prediction looks past the end of a part.

    Raises:
        ValueError: names the layers.
    """
    if args.hybrid_override_pattern is not None:
        raise ValueError("--hybrid-override-pattern is deprecated: give --hybrid-layer-pattern")
    pattern = args.hybrid_layer_pattern
    if pattern is None:
        return
    refused = "".join(sorted(set(pattern) - set(_HYBRID_LAYERS)))
    if refused:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: {refused} cannot be used: only attention (*), "
            "latent attention (+), MLPs (-) and experts (E) run on a part of a sample"
        )
    if not set(pattern) & set(ATTENTION_LAYERS):
        raise ValueError(f"--hybrid-layer-pattern {pattern} holds no attention layer, * or +")
    stages = args.pipeline_model_parallel_size
    if "|" in pattern and pattern.count("|") + 1 != stages:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} marks {pattern.count('|') + 1} stages, "
            f"--pipeline-model-parallel-size is {stages}"
        )
    args.num_layers = len(hybrid_layers(args))  # as Megatron does later
    if "+" in pattern:
        args.multi_latent_attention = True


def check_latent(args: argparse.Namespace) -> None:
    """Checks how latent attention is split and rotated.

    Raises:
        ValueError: names the flag that is missing.
    """
    if not args.multi_latent_attention:
        return
    if args.apply_rope_fusion:
        raise ValueError(
            "--multi-latent-attention needs --no-rope-fusion: the fused kernel rotates by row and "
            "not by position"
        )
    # Elsewhere each tensor-parallel rank keeps its own heads' part of the gradient of the rotary
    # key that all heads share, and the gradient of --qk-layernorm's query norm is counted twice.
    is_whole = args.sequence_parallel and args.transformer_impl == "transformer_engine"
    if args.tensor_model_parallel_size > 1 and not is_whole:
        raise ValueError(
            "--multi-latent-attention with --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} needs --transformer-impl transformer_engine and "
            "--sequence-parallel: without them Megatron 0.19 gets its gradients wrong"
        )


def check_norms(args: argparse.Namespace) -> None:
    """Checks that the norms of Megatron's local layers can run on a part of the tokens.

    A layer of `--spec` brings norms of its own.

    Raises:
        ValueError: names both flags.
    """
    is_split = args.sequence_parallel and args.tensor_model_parallel_size > 1
    if not is_split or args.transformer_impl != "local" or args.spec is not None:
        return
    if args.normalization == "RMSNorm" or not HAVE_APEX:
        raise ValueError(
            "--sequence-parallel needs --transformer-impl transformer_engine, which CPU ranks do "
            "not run, or a --spec: the norm of Megatron's local layers refuses it"
        )


def check_window(args: argparse.Namespace) -> None:
    """Checks the sliding window and which layers have it.

    Raises:
        ValueError: the window reaches past the token itself, or the layers are not the model's.
    """
    window, skip = args.window_size, args.window_attn_skip_freq
    if window is None:
        return
    if len(window) != 2 or window[0] < -1 or window[1] != 0:
        given = ",".join(str(side) for side in window)
        raise ValueError(
            "--window-size must be LEFT,0 with LEFT at least 0, or -1 for all tokens before, got "
            f"{given}: attention is causal"
        )
    if isinstance(skip, list):
        if len(skip) != args.num_layers:
            raise ValueError(
                f"--window-attn-skip-freq lists {len(skip)} layers, --num-layers is "
                f"{args.num_layers}"
            )
    elif skip is not None and skip < 1:
        raise ValueError(f"--window-attn-skip-freq must be at least 1, got {skip}")
