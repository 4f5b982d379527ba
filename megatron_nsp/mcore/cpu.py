"""CPU mode: run Megatron's unmodified training loop on CPU ranks with gloo (`--nsp-cpu`).

Megatron names the device "cuda" in some 200 places and asks `torch.cuda` for streams, events,
memory and generators. This mode answers those calls on the CPU, so that tests and small examples
execute the very loop, optimizer and checkpoint code that a GPU run executes. It is not a fallback:
nothing here happens before `enable_cpu_mode()` is called, and a process that has already touched a
GPU is refused.

What is true afterwards, for the calling process:
    - a tensor asked for on "cuda", on a device index or by `.cuda()` lives on the CPU;
    - a CPU tensor names its type `torch.cuda.*Tensor`, which is how Megatron's optimizers sort it;
    - streams and events exist and do nothing, for CPU work is finished when a call returns;
    - the "CUDA" random generator is torch's CPU generator;
    - `torch.compile` leaves functions as they are;
    - without a launcher, the environment describes a job of one rank.

The mode is in force in the thread that enabled it (torch keeps function modes per thread) and
cannot be undone: use one process per mode. Multi-token all-to-alls, bf16, float32 and, for
exactness tests, float64 models run under it; kernels that exist for GPUs only do not, and
`cpu_default_args()` lists the Megatron settings which select the others.
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

# Settings that select code paths without GPU kernels: parser destination -> value. The first block
# differs from Megatron's defaults, the second repeats defaults that CPU mode cannot do without.
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
    "nccl_ub": False,
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

    Call it from `extra_args_provider`, after Megatron has added its arguments and before it parses:
    the user then types `--nsp-cpu` alone. A flag that the user does type still wins and is left to
    `check_cpu_args`.

    Args:
        parser: Megatron's parser.
    """
    parser.set_defaults(**_CPU_ARGS)


def check_cpu_args(args: Namespace) -> None:
    """Refuses settings that CPU mode cannot honour.

    Args:
        args: parsed Megatron arguments, validated or not.

    Raises:
        ValueError: a setting differs from what CPU mode needs; names setting and both values.
    """
    for name, needed in _CPU_ARGS.items():
        value = getattr(args, name, needed)
        if value != needed:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--nsp-cpu needs {flag} = {needed}, but it was set to {value}; leave it out"
            )


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
            raise RuntimeError(
                f"CPU mode is on with float64={active.float64}, cannot change to {float64}"
            )
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
    _CpuDeviceMode(float64).__enter__()
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
            args, kw = self._widen(func, args, kw)
            if func is Tensor.float:
                func = Tensor.double
        return func(*args, **kw)

    def _type(self, tensor: Tensor, dtype: Any = None, **kw: Any) -> Any:
        """`Tensor.type`: names the type as on a GPU, and takes such a name back."""
        if dtype is None:
            name = tensor.type()
            return _CUDA_TYPE_NAMES.get(name, name)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        elif self.float64 and dtype is torch.float32:
            dtype = torch.float64
        return tensor.type(dtype, **kw)

    @staticmethod
    def _widen(
        func: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turns float32 arguments into float64: the model's norms, router, rotary table and loss
        ask for float32 by name, and would round whatever they touch."""
        wide = {key: torch.float64 if v is torch.float32 else v for key, v in kw.items()}
        return tuple(torch.float64 if a is torch.float32 else a for a in args), wide


class _Stream:
    """A CUDA stream on a machine whose work is finished when a call returns."""

    priority_range = staticmethod(lambda: (0, 0))  # asked for when side streams are made
    cuda_stream = 0  # the raw handle some callers compare
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes and ignores device and priority."""

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to restore."""

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        """Returns an event that has happened."""
        event = _Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: "_Stream") -> None:
        """Nothing to wait for."""

    def wait_event(self, event: "_Event") -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: all work is finished."""
        return True


class _Event:
    """A CUDA event: the time at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes and ignores timing and sharing options."""
        self.time_s = time.perf_counter()

    def record(self, stream: _Stream | None = None) -> None:
        """Takes the time."""
        self.time_s = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: it has happened."""
        return True

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end.time_s - self.time_s) * 1e3


def _set_environment() -> None:
    """Sets what torch and Megatron read from the environment."""
    # Not even a GPU that is present may be used, by libraries that look for one themselves.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron wraps its fused functions in torch.compile: minutes of C++ compilation on a CPU.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True
    # `python script.py` without torchrun is a job of one rank; torchrun sets all of these.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))


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

    def context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Stands in for `with torch.cuda.stream(...)` and `with torch.cuda.device(...)`."""
        return contextlib.nullcontext()

    def resident_bytes(*args: Any, **kwargs: Any) -> int:
        """Memory of this process: the nearest thing to allocated GPU memory in Megatron's logs."""
        return int(psutil.Process().memory_info().rss)

    def memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
        """Every statistic of the caching allocator reads 0: there is no such allocator."""
        return defaultdict(int)

    # Compute capability 10: below it Megatron demands CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor
    # parallelism and forbids it for FSDP, a launch-order rule that means nothing here.
    properties = SimpleNamespace(
        name="cpu", major=10, minor=0, multi_processor_count=1, total_memory=0
    )
    stand_ins: dict[str, Any] = {
        "Stream": _Stream,  # side streams of DDP, MoE and p2p
        "Event": _Event,  # timers and stream order
        "current_stream": lambda *a: stream,
        "default_stream": lambda *a: stream,
        "stream": context,
        "device": context,
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
        "memory_stats": memory_stats,
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

    def get_state(device: Any = "cuda") -> Tensor:
        return generator.get_state()

    def set_state(new_state: Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    def seed(value: int) -> None:
        # Not torch.manual_seed, which seeds CUDA as well and would come back here.
        generator.manual_seed(int(value))

    torch.cuda.default_generators = (generator,)
    for module in (torch.cuda, torch.cuda.random):
        for name, stand_in in (
            ("get_rng_state", get_state),
            ("set_rng_state", set_state),
            ("manual_seed", seed),
            ("manual_seed_all", seed),
        ):
            setattr(module, name, stand_in)


def _patch_all_to_all() -> None:
    """Makes split sizes lists of int: Megatron's MoE dispatcher turns them from a tensor into
    numbers only if that tensor is on a GPU, and the collective takes numbers."""
    original = dist.all_to_all_single

    def ints(sizes: Any) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output, input, ints(output_split_sizes), ints(input_split_sizes), group, async_op
        )

    dist.all_to_all_single = all_to_all_single


def _patch_optimizers() -> None:
    """Skips torch's check whether an optimizer step is being captured into a CUDA graph: it asks
    the driver as soon as `torch.cuda.is_available()` says yes."""
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None
    torch.optim.Optimizer._cuda_graph_capture_health_check = lambda self: None


def _patch_megatron() -> None:
    """Changes the things that no stand-in for torch can reach."""
    # Imported here, not above: decorators of these modules read the environment set before.
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random

    # NCCL options cannot be given to a gloo group; FSDP asks for high-priority streams by default.
    parallel_state.get_nccl_options = lambda pg_name, nccl_comm_cfgs: None

    # The tracker warns when the CPU generator moved inside a fork. Here that is the forked one.
    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logging.getLogger(random.__name__).addFilter(keep)
    _patch_distributed_optimizer(DistributedOptimizer)


def _patch_distributed_optimizer(optimizer_class: Any) -> None:
    """Makes checkpoints of the distributed optimizer loadable on top of torch's own Adam.

    On GPUs the inner optimizer is a fused one, which counts steps per group. Torch's Adam counts
    them per parameter, and there Megatron 0.19.2 (a) finds no step to read before the first one, so
    that every load fails, (b) gives all parameters one and the same tensor, so that the count then
    grows by the number of parameters per step, and (c) overwrites the count that it has just read
    from the checkpoint with the one of the fresh optimizer, or looks for it in vain. Besides, (d)
    float32 shards are views of leaves, which a load may overwrite only without gradient.

    Args:
        optimizer_class: Megatron's `DistributedOptimizer`.
    """
    original_state_dict = optimizer_class.state_dict
    original_load = optimizer_class.load_state_dict
    original_set = optimizer_class._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> dict[str, Any]:
        if self.init_state_fn is not None and len(self.optimizer.state) == 0:  # (a)
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return original_state_dict(self)

    def load_state_dict(self: Any, loaded: dict[str, Any]) -> None:
        with torch.no_grad():  # (d)
            original_load(self, loaded)
        for state in self.optimizer.state.values():  # (b)
            if "step" in state:
                state["step"] = state["step"].clone()

    def set_states(self: Any, model_param: Tensor, tensors: dict[str, Any]) -> None:
        original_set(self, model_param, {**tensors, "step": None})  # (c): None is passed over

    optimizer_class.state_dict = state_dict
    optimizer_class.load_state_dict = load_state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_states
