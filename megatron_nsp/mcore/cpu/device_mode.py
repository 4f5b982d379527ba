"""A torch function mode under which everything asked for on a GPU is made on the CPU."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CUDA_TYPE_NAMES: Mapping[str, str] = {
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    # Megatron sorts parameters into half and full precision; float64 belongs to the latter.
    "torch.DoubleTensor": "torch.cuda.FloatTensor",
}


def active_mode() -> "CpuDeviceMode | None":
    """Returns the mode in force, found on torch's own stack so that no state is kept here."""
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, CpuDeviceMode):
            return mode
    return None


def _is_cuda(device: Any) -> bool:
    """True for what torch reads as a CUDA device: "cuda", "cuda:1", 1, torch.device("cuda")."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class CpuDeviceMode(TorchFunctionMode):
    """Rewrites the device, and for float64 the dtype, of every torch call made from Python."""

    def __init__(self, float64: bool) -> None:
        super().__init__()
        self.float64 = float64

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `func` with its request for a GPU turned into one for the CPU."""
        kw = dict(kwargs or {})
        if func is Tensor.cuda or func is Tensor.pin_memory:
            return args[0]  # what torch does too when the tensor is where it should be
        if func is Tensor.record_stream:
            return None  # memory is never reused while a stream still reads it: there is none
        if func is Tensor.type:
            return self._type(*args, **kw)
        if func is Tensor.to:
            args = (args[0], *("cpu" if _is_cuda(a) else a for a in args[1:]))
        if _is_cuda(kw.get("device")):
            kw["device"] = "cpu"
        kw.pop("pin_memory", None)  # page-locked memory serves copies to a GPU
        if self.float64:
            # Norms, router, rotary table and loss ask for float32 by name and would round.
            args = tuple(_widened(a) for a in args)
            kw = {key: _widened(value) for key, value in kw.items()}
            func = Tensor.double if func is Tensor.float else func
        return func(*args, **kw)

    def _type(self, tensor: Tensor, dtype: Any = None, **kw: Any) -> Any:
        """`Tensor.type`: names the type as on a GPU, and takes such a name back."""
        if dtype is None:
            name = tensor.type()
            return _CUDA_TYPE_NAMES.get(name, name)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return tensor.type(_widened(dtype) if self.float64 else dtype, **kw)


def _widened(value: Any) -> Any:
    """float64 for float32, anything else as it is."""
    return torch.float64 if value is torch.float32 else value


def keep_in_backward(mode: CpuDeviceMode) -> None:
    """Keeps the mode in force during backward.

    torch takes a mode off its stack for as long as the mode runs a function, and the function
    `torch.autograd.backward` runs Python code: that of Megatron's own autograd functions.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if active_mode() else mode:
            return original(*args, **kwargs)

    autograd._engine_run_backward = run_backward
