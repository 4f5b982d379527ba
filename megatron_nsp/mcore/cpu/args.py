"""Megatron settings that CPU mode implies, as defaults of the parser."""

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, NamedTuple


class CpuArgument(NamedTuple):
    """An argument that CPU mode needs at one value.

    Attributes:
        flag: the flag that changes it.
        value: what CPU mode needs.
    """

    flag: str
    value: Any


# Settings that avoid GPU kernels. The first block differs from Megatron's defaults, the second
# repeats those that CPU mode cannot do without.
CPU_ARGS: Mapping[str, CpuArgument] = {
    "transformer_impl": CpuArgument("--transformer-impl", "local"),
    "distributed_backend": CpuArgument("--distributed-backend", "gloo"),
    "apply_rope_fusion": CpuArgument("--no-rope-fusion", False),
    "gradient_accumulation_fusion": CpuArgument("--no-gradient-accumulation-fusion", False),
    "masked_softmax_fusion": CpuArgument("--no-masked-softmax-fusion", False),
    "bias_dropout_fusion": CpuArgument("--no-bias-dropout-fusion", False),
    "no_persist_layer_norm": CpuArgument("--no-persist-layer-norm", True),
    #
    "fp8": CpuArgument("--fp8-format", None),
    "fp4": CpuArgument("--fp4-format", None),
    "cuda_graph_impl": CpuArgument("--cuda-graph-impl", "none"),
    "optimizer_cuda_graph": CpuArgument("--optimizer-cuda-graph", False),
    "optimizer_cpu_offload": CpuArgument("--optimizer-cpu-offload", False),
    "moe_grouped_gemm": CpuArgument("--moe-grouped-gemm", False),
    "moe_permute_fusion": CpuArgument("--moe-permute-fusion", False),
    "moe_router_fusion": CpuArgument("--moe-router-fusion", False),
    "gpu_sniff_test_interval": CpuArgument("--gpu-sniff-test-interval", None),
    "log_straggler": CpuArgument("--log-straggler", False),  # asks the GPU's driver
    # a process of its own, outside CPU mode, that asks for a GPU and leaves its rank waiting
    "use_persistent_ckpt_worker": CpuArgument("--use-persistent-ckpt-worker", False),
}
"""By parser destination. A flag that is typed nevertheless still wins, and is refused."""


def set_cpu_defaults(parser: ArgumentParser) -> None:
    """Makes the settings CPU mode implies the parser's defaults.

    Call it from `extra_args_provider`: the user then types `--nsp-cpu` alone.

    Args:
        parser: Megatron's parser.
    """
    parser.set_defaults(**{name: argument.value for name, argument in CPU_ARGS.items()})
