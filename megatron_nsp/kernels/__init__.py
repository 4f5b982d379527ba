"""The one seam through which attention kernels are chosen.

Every kernel takes and gives out and LSE (`base.AttentionKernel`). Nothing outside this folder
imports a kernel package.
"""

import torch

from megatron_nsp.kernels.base import AttentionKernel, AttentionMask, SampleBounds

__all__ = ["KERNELS", "AttentionKernel", "AttentionMask", "SampleBounds", "choose_kernel"]

KERNELS = ("auto", "cpu-flash", "cuda-varlen", "reference")


def choose_kernel(name: str, device: torch.device) -> AttentionKernel:
    """The kernel called `name`; 'auto' is the flash kernel of the device.

    Raises:
        ValueError: there is no such kernel, or it does not run on `device`.
    """
    if name not in KERNELS:
        raise ValueError(f"--nsp-kernel must be one of {', '.join(KERNELS)}, got {name}")
    if name == "auto":
        name = "cuda-varlen" if device.type == "cuda" else "cpu-flash"
    needed = {"cpu-flash": "cpu", "cuda-varlen": "cuda"}.get(name, device.type)
    if needed != device.type:
        raise ValueError(
            f"--nsp-kernel {name} runs on {needed} tensors, this job's device is {device}"
        )
    if name == "cpu-flash":
        from megatron_nsp.kernels.cpu_flash import CpuFlashKernel

        return CpuFlashKernel()
    if name == "cuda-varlen":
        from megatron_nsp.kernels.cuda_varlen import CudaVarlenKernel

        return CudaVarlenKernel()
    from megatron_nsp.kernels.reference import ReferenceKernel

    return ReferenceKernel()
