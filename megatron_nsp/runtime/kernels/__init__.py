"""The one seam through which attention kernels are chosen.

Every kernel takes and gives out and LSE (`base.AttentionKernel`). Nothing outside this folder
imports a kernel package.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from megatron_nsp.plan.backends import NATIVE
from megatron_nsp.runtime.kernels.base import (
    AttentionKernel,
    AttentionMask,
    NativeAttention,
    SampleBounds,
    require_lse,
)

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "AttentionMask",
    "NativeAttention",
    "SampleBounds",
    "choose_kernel",
    "choose_native",
    "require_lse",
]


@dataclass(frozen=True)
class _Choice:
    """A kernel that can be asked for.

    Attributes:
        place: module and class in this folder.
        device: type of the tensors it runs on; None = any.
        needs: module that must be importable.
        package: how people call what brings that module.
        least: compute capability from which on it runs.
        most: the last major capability it runs on.
    """

    place: tuple[str, str]
    device: str | None
    needs: str = "torch"
    package: str = "torch"
    least: tuple[int, int] = (8, 0)
    most: int = 99


_CHOICES = {
    "cpu-flash": _Choice(("cpu_flash", "CpuFlashKernel"), "cpu"),
    "cuda-varlen": _Choice(("cuda_varlen", "CudaVarlenKernel"), "cuda"),
    "flash-attn-2": _Choice(
        ("flash_attn2", "FlashAttn2Kernel"),
        "cuda",
        "flash_attn.flash_attn_interface",
        "flash-attn 2",
    ),
    "flash-attn-3": _Choice(
        ("flash_attn3", "FlashAttn3Kernel"),
        "cuda",
        "flash_attn_interface",
        "flash-attn 3",
        least=(9, 0),
        most=9,
    ),
    "flash-attn-4": _Choice(
        ("flash_attn4", "FlashAttn4Kernel"),
        "cuda",
        "flash_attn.cute",
        "flash-attn-4",
        least=(9, 0),
    ),
    "reference": _Choice(("reference", "ReferenceKernel"), None),
    "te": _Choice(("te", "TeKernel"), "cuda", "transformer_engine.pytorch", "transformer-engine"),
    "te-module": _Choice(
        ("te_module", "TeModuleKernel"), "cuda", "transformer_engine.pytorch", "transformer-engine"
    ),
}

_NATIVE_CHOICE = _Choice(
    ("te_cp", "TeContextParallel"), "cuda", "transformer_engine.pytorch", "transformer-engine"
)

KERNELS = ("auto", *_CHOICES)

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
    if name == "auto":
        name = _automatic(device)
    kernel: AttentionKernel = _load(f"--nsp-kernel {name}", _CHOICES[name], device)
    return kernel


def choose_native(backend: str, device: torch.device) -> NativeAttention | None:
    """What runs the nodes that a backend leaves to Transformer Engine; None for other backends.

    Raises:
        ValueError: it does not run on `device`, or Transformer Engine is not installed.
    """
    if backend not in NATIVE:
        return None
    native: NativeAttention = _load(f"--nsp-backend {backend}", _NATIVE_CHOICE, device)
    return native


def _load(asked: str, choice: _Choice, device: torch.device) -> Any:
    """What a flag asks for, or the one line that says why it cannot be had."""
    if choice.device not in (None, device.type):
        raise ValueError(f"{asked} runs on {choice.device} tensors, this job's device is {device}")
    if not _is_installed(choice):
        raise ValueError(
            f"{asked} needs the package {choice.needs} ({choice.package}), which is not installed"
        )
    capability = _capability(device)
    if capability is not None and not _runs_on(choice, capability):
        limit = f"from {choice.least[0]}.{choice.least[1]}"
        if choice.most < 99:
            limit += f" to {choice.most}.x"
        raise ValueError(
            f"{asked} runs on GPUs of compute capability {limit}, this one has "
            f"{capability[0]}.{capability[1]}"
        )
    module, class_name = choice.place
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)()
    except ImportError as error:
        raise ValueError(
            f"{asked}: the package {choice.needs} ({choice.package}) is installed but does not "
            f"load: {str(error).splitlines()[0]}"
        ) from error


def _automatic(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu-flash"
    capability = _capability(device)
    if capability is None:  # no GPU to ask: a job that only checks its flags
        return "cuda-varlen"
    is_passed_over = torch.are_deterministic_algorithms_enabled() and capability[0] == 9
    for name in _PREFERRED_FROM_9 if capability >= (9, 0) else _PREFERRED_BELOW_9:
        choice = _CHOICES[name]
        if name == "te" and is_passed_over:
            continue
        if _is_installed(choice) and _runs_on(choice, capability):
            return name
    return "cuda-varlen"


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for a CPU and where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _runs_on(choice: _Choice, capability: tuple[int, int]) -> bool:
    return choice.device != "cuda" or (capability >= choice.least and capability[0] <= choice.most)


def _is_installed(choice: _Choice) -> bool:
    try:
        return importlib.util.find_spec(choice.needs) is not None
    except ImportError:  # a parent package is missing or does not load
        return False
