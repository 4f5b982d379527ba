"""The one seam through which attention kernels are chosen.

Every kernel takes and gives out and LSE and says of itself what there is to know
(`base.AttentionKernel`); a new one is a file here and a line in `_CLASSES`. Nothing outside this
folder imports a kernel package.
"""

from collections.abc import Callable

import torch

from megatron_nsp.plan.backends import NATIVE
from megatron_nsp.runtime.kernels.base import (
    AttentionKernel,
    AttentionMask,
    AttentionState,
    NativeAttention,
    SampleBounds,
    VarlenCall,
    require_lse,
)
from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel
from megatron_nsp.runtime.kernels.cuda_varlen import CudaVarlenKernel
from megatron_nsp.runtime.kernels.flash_attn2 import FlashAttn2Kernel
from megatron_nsp.runtime.kernels.flash_attn3 import FlashAttn3Kernel
from megatron_nsp.runtime.kernels.flash_attn4 import FlashAttn4Kernel
from megatron_nsp.runtime.kernels.needs import Needs, capability_of
from megatron_nsp.runtime.kernels.reference import ReferenceKernel
from megatron_nsp.runtime.kernels.te import TeKernel
from megatron_nsp.runtime.kernels.te_cp import TeContextParallel
from megatron_nsp.runtime.kernels.te_module import TeModuleKernel

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "AttentionMask",
    "AttentionState",
    "NativeAttention",
    "SampleBounds",
    "VarlenCall",
    "choose_kernel",
    "choose_native",
    "kernel_class",
    "require_lse",
    "takes_32_bits",
]

_CLASSES: tuple[type[AttentionKernel], ...] = (
    CpuFlashKernel,
    CudaVarlenKernel,
    FlashAttn2Kernel,
    FlashAttn3Kernel,
    FlashAttn4Kernel,
    ReferenceKernel,
    TeKernel,
    TeModuleKernel,
)

KERNELS = ("auto", *(each.name for each in _CLASSES))

# What auto takes, the first that is installed and runs on the GPU. Transformer Engine itself holds
# cuDNN the fastest from capability 9.0 on, and flash-attn 2 below.
_PREFERRED_FROM_9 = ("te", "flash-attn-3", "flash-attn-4", "flash-attn-2", "cuda-varlen")
_PREFERRED_BELOW_9 = ("flash-attn-2", "te", "cuda-varlen")


def choose_kernel(name: str, device: torch.device) -> AttentionKernel:
    """The kernel called `name`.

    'auto' is cpu-flash on CPU. On a GPU of capability 9.0 or more it is the first installed of te,
    flash-attn-3, flash-attn-4 and flash-attn-2, on an older one of flash-attn-2 and te; where none
    is installed, cuda-varlen. Under deterministic algorithms te is passed over on capability 9.0,
    where cuDNN's deterministic backward of long samples wants more memory than there is.

    Raises:
        ValueError: there is no such kernel, it does not run on `device`, or what it needs is not
            installed.
    """
    if name not in KERNELS:
        raise ValueError(f"--nsp-kernel must be one of {', '.join(KERNELS)}, got {name}")
    chosen = kernel_class(_automatic(device) if name == "auto" else name)
    return _made(f"--nsp-kernel {chosen.name}", chosen, chosen.needs, device)


def choose_native(backend: str, device: torch.device) -> NativeAttention | None:
    """What runs the nodes that a backend leaves to Transformer Engine; None for other backends.

    Raises:
        ValueError: it does not run on `device`, or Transformer Engine is not installed.
    """
    if backend not in NATIVE:
        return None
    return _made(f"--nsp-backend {backend}", TeContextParallel, TeContextParallel.needs, device)


def kernel_class(name: str) -> type[AttentionKernel]:
    """The class of the kernel called `name`, whatever it needs."""
    (found,) = (each for each in _CLASSES if each.name == name)
    return found


def takes_32_bits(name: str) -> bool:
    """Whether a kernel takes more than 16 bits on a GPU; what auto chooses there does not."""
    return any(each.takes_32_bits for each in _CLASSES if each.name == name)


def _made[Made](asked: str, make: Callable[[], Made], needs: Needs, device: torch.device) -> Made:
    """What a flag asks for, or the one line that says why it cannot be had."""
    needs.check(asked, device)
    try:
        return make()
    except ImportError as error:
        raise ValueError(
            f"{asked}: the package {needs.module} ({needs.package}) is installed but does not "
            f"load: {str(error).splitlines()[0]}"
        ) from error


def _automatic(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu-flash"
    capability = capability_of(device)
    if capability is None:  # no GPU to ask: a job that only checks its flags
        return "cuda-varlen"
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    for name in _PREFERRED_FROM_9 if capability >= (9, 0) else _PREFERRED_BELOW_9:
        kernel = kernel_class(name)
        if is_deterministic and capability[0] in kernel.deterministic_is_heavy_on:
            continue
        if kernel.needs.is_installed() and kernel.needs.runs_on(capability):
            return name
    return "cuda-varlen"
