"""Megatron settings that CPU mode implies: defaults of the parser, and a check that they hold."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

# Settings that avoid GPU kernels: parser destination -> value. The first block differs from
# Megatron's defaults, the second repeats those that CPU mode cannot do without.
_CPU_ARGS: Mapping[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "no_persist_layer_norm": True,
    #
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
    "optimizer_cuda_graph": False,
    "optimizer_cpu_offload": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "tp_comm_overlap": False,
}


def cpu_default_args() -> dict[str, Any]:
    """Returns the Megatron settings CPU mode implies, as parser destination -> value."""
    return dict(_CPU_ARGS)


def set_cpu_defaults(parser: ArgumentParser) -> None:
    """Makes the settings CPU mode implies the parser's defaults.

    Call it from `extra_args_provider`: the user then types `--nsp-cpu` alone. A flag that is typed
    nevertheless still wins and is left to `check_cpu_args`.

    Args:
        parser: Megatron's parser.
    """
    parser.set_defaults(**_CPU_ARGS)


def check_cpu_args(args: Namespace) -> None:
    """Refuses settings that CPU mode cannot honour.

    Args:
        args: parsed Megatron arguments, validated or not.

    Raises:
        ValueError: a setting differs from what CPU mode needs; names it and both values.
    """
    for name, needed in _CPU_ARGS.items():
        value = getattr(args, name, needed)
        if value != needed:
            raise ValueError(f"--nsp-cpu needs {name} = {needed!r}, but the flags set {value!r}")
