"""CPU mode: run Megatron's unmodified training loop on CPU ranks with gloo (`--nsp-cpu`).

Megatron names the device "cuda" in some 200 places and asks `torch.cuda` for streams, events,
memory and generators. This mode answers on the CPU, so that tests and small examples execute the
very loop, optimizer and checkpoint code of a GPU run. It is no fallback: nothing happens before
`enable_cpu_mode()` is called, and a process that has touched a GPU is refused. Afterwards:

    - a tensor asked for on "cuda", on a device index or by `.cuda()` lives on the CPU;
    - a CPU tensor names its type `torch.cuda.*Tensor`, which is how Megatron's optimizers sort it;
    - streams and events exist and do nothing, for CPU work is finished when a call returns;
    - the "CUDA" random generator is torch's CPU generator;
    - `torch.compile` leaves functions as they are;
    - without a launcher, the environment describes a job of one rank.

The mode is in force in the thread that enabled it, for torch keeps function modes per thread, and
cannot be undone: one process, one mode. Models in bf16, float32 and, for exactness tests, float64
run under it; kernels for GPUs do not, and `cpu_default_args()` lists the settings that avoid them.
"""

import contextlib
import importlib
import logging
import os
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

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

_CUDA_TYPE_NAMES: Mapping[str, str] = {
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    # Megatron sorts parameters into half and full precision; float64 belongs to the latter.
    "torch.DoubleTensor": "torch.cuda.FloatTensor",
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


def enable_cpu_mode(*, float64: bool = False) -> None:
    """Puts this process into CPU mode. A second call with the same arguments does nothing.

    Call it before Megatron is imported where possible, and always before a process group exists.

    Args:
        float64: serve every request for float32 with float64, so that a whole Megatron model, its
            gradients and its optimizer run in double precision: for exactness tests only. Leave
            `--bf16` and `--fp16` off with it.

    Raises:
        RuntimeError: a GPU is already in use by this process, or CPU mode is on with the other
            value of `float64`.
    """
    active = _active_mode()
    if active is not None:
        if active.float64 != float64:
            raise RuntimeError(f"CPU mode is on with float64={active.float64}, not {float64}")
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("CPU mode must be enabled before this process touches a GPU")
    _set_environment()
    # Imported here: it reads the environment set above, and it must see torch.cuda unpatched, for
    # it files torch's functions by identity and stops at a function that has two names.
    importlib.import_module("torch._dynamo")
    _patch_torch_cuda()
    _patch_generators()
    _patch_all_to_all()
    _patch_optimizers()
    if float64:
        torch.set_default_dtype(torch.float64)
    # Entered for the rest of the process: there is no moment at which Megatron may see a GPU again.
    mode = _CpuDeviceMode(float64)
    mode.__enter__()
    _patch_backward(mode)
    _patch_megatron()


def _active_mode() -> "_CpuDeviceMode | None":
    """Returns the mode in force, found on torch's own stack so that no state is kept here."""
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, _CpuDeviceMode):
            return mode
    return None


def _is_cuda(device: Any) -> bool:
    """True for what torch reads as a CUDA device: "cuda", "cuda:1", 1, torch.device("cuda")."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class _CpuDeviceMode(TorchFunctionMode):
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


class _Stream:
    """A CUDA stream on a machine whose work is finished when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None:
        """Nothing to wait for."""

    synchronize = wait_event = wait_stream

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = _Event() if event is None else event
        event.record(self)
        return event


class _Event:
    """A CUDA event: the time at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record()

    def record(self, stream: _Stream | None = None) -> None:
        self.time_s = time.perf_counter()

    def wait(self, *args: Any) -> None:
        """Nothing to wait for."""

    synchronize = wait

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end.time_s - self.time_s) * 1e3


def _set_environment() -> None:
    """Sets what torch and Megatron look up when they are imported."""
    # Not even a GPU that is present may be used, by libraries that look for one themselves.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron takes optimizer and norm kernels from these wherever they are installed.
    for name in ("transformer_engine", "apex"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    # Megatron wraps its fused functions in torch.compile: minutes of C++ compilation on a CPU.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True
    # `python script.py` without torchrun is a job of one rank; torchrun sets all of these.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": str(_free_port())}.items():
            os.environ.setdefault(name, value)


def _free_port() -> int:
    """Returns a port nobody listens on, so that two one-rank jobs do not meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _patch_torch_cuda() -> None:
    """Puts stand-ins for streams, events, memory and device queries into `torch.cuda`."""
    stream = _Stream()  # one, so that "am I on the side stream" compares unequal to a new one
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Stands in for calls that only order or configure GPU work."""

    def resident_bytes(*args: Any, **kwargs: Any) -> int:
        """Memory of this process: the nearest thing to allocated GPU memory in Megatron's logs."""
        return int(psutil.Process().memory_info().rss)

    # Compute capability 10: below it Megatron demands CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor
    # parallelism and forbids it for FSDP, a launch-order rule that means nothing here.
    properties = SimpleNamespace(name="cpu", major=10, minor=0, multi_processor_count=1)
    stand_ins: dict[str, Any] = {
        "Stream": _Stream,  # side streams of DDP, MoE and p2p
        "Event": _Event,  # timers and stream order
        "current_stream": lambda *a: stream,
        "default_stream": lambda *a: stream,
        "stream": lambda *a: contextlib.nullcontext(),
        "device": lambda *a: contextlib.nullcontext(),
        "set_stream": nothing,
        "set_device": nothing,  # called with the local rank at start
        "synchronize": nothing,  # every timer calls it
        "empty_cache": nothing,
        "is_available": lambda: True,  # asserted by initialize_megatron
        "is_initialized": lambda: True,  # makes torch run its lazy calls at once
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: ranks_here,  # 0 would skip Megatron's process groups and seeds
        "current_device": lambda: 0,  # passed on as device=0, which the mode maps to the CPU
        "get_device_capability": lambda *a: (10, 0),
        "get_device_properties": lambda *a: properties,
        "get_device_name": lambda *a: "cpu",
        "memory_allocated": resident_bytes,  # memory lines of the training log
        "memory_reserved": resident_bytes,
        "max_memory_allocated": resident_bytes,
        "max_memory_reserved": resident_bytes,
        "reset_peak_memory_stats": nothing,
        "memory_stats": lambda *a: defaultdict(int),  # there is no caching allocator
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)


def _patch_generators() -> None:
    """Lets torch's CPU generator be the one that Megatron calls the CUDA generator.

    Its RNG trackers then fork, save and restore the generator that CPU dropout and weight
    initialisation really draw from; with a second generator beside it, tensor-parallel ranks would
    draw equal weights.
    """
    generator = torch.default_generator
    stand_ins: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        # Not torch.manual_seed, which seeds CUDA as well and would come back here.
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
    }
    torch.cuda.default_generators = (generator,)
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
        setattr(torch.cuda.random, name, stand_in)


def _patch_all_to_all() -> None:
    """Makes split sizes lists of int.

    Megatron's MoE dispatcher turns them from a tensor into numbers only if that tensor is on a GPU,
    and the collective takes numbers.
    """
    original: Callable[..., Any] = dist.all_to_all_single

    def ints(sizes: Any) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        sizes = (ints(output_split_sizes), ints(input_split_sizes))
        return original(output, input, *sizes, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


def _patch_optimizers() -> None:
    """Skips torch's check whether an optimizer step is being captured into a CUDA graph.

    It asks the driver as soon as `torch.cuda.is_available()` says yes.
    """
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(torch.optim.Optimizer, name, lambda self: None)


def _patch_backward(mode: _CpuDeviceMode) -> None:
    """Keeps the mode in force during backward.

    torch takes a mode off its stack for as long as the mode runs a function, and the function
    `torch.autograd.backward` runs Python code: that of Megatron's own autograd functions.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _active_mode() else mode:
            return original(*args, **kwargs)

    autograd._engine_run_backward = run_backward


def _patch_megatron() -> None:
    """Changes the few things in Megatron that no stand-in for torch can reach."""
    # Imported here, not above: decorators of these modules read the environment set before.
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from megatron_nsp.mcore.torch_adam import make_checkpoints_loadable

    # NCCL options cannot be given to a gloo group; FSDP asks for high-priority streams by itself.
    parallel_state.get_nccl_options = lambda pg_name, nccl_comm_cfgs: None

    # The tracker warns when the CPU generator moves inside a fork. Here that is the forked one.
    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logging.getLogger(random.__name__).addFilter(keep)
    make_checkpoints_loadable()  # the inner optimizer is always torch's own here
