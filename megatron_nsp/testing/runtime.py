"""What a rank runs nested attention with where no training job makes it: tests, measurements."""

import torch

from megatron_nsp.runtime import executor
from megatron_nsp.runtime.attention import AttentionRuntime
from megatron_nsp.runtime.executor import CommunicationQueue
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionKernel, choose_kernel
from megatron_nsp.runtime.kernels.base import NativeAttention

CPU = torch.device("cpu")


def local_runtime(
    groups: NestedGroups,
    kernel: AttentionKernel | str = "auto",
    *,
    overlap: bool = True,
    device: torch.device = CPU,
    queue: CommunicationQueue | None = None,
    native: NativeAttention | None = None,
) -> AttentionRuntime:
    """The runtime of one rank.

    Args:
        groups: the tree's groups.
        kernel: the kernel, or its name as --nsp-kernel calls it.
        overlap: whether exchanges run beside compute.
        device: where attention runs.
        queue: what runs the exchanges, in place of the device's own.
        native: what runs the nodes that Transformer Engine is to run itself.

    Raises:
        ValueError: the named kernel does not run here.
    """
    if isinstance(kernel, str):
        kernel = choose_kernel(kernel, device)
    if queue is None:
        queue = executor.build_queue(device, overlap)
    return AttentionRuntime(groups, kernel, queue, native)
