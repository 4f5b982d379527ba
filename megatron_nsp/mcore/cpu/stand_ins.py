"""What stands in for the parts of torch that a GPU alone has: streams, events, generators."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor


def put_stand_ins() -> None:
    """Replaces what Megatron and torch's optimizers ask a GPU for, for the rest of the process."""
    _replace_torch_cuda()
    _share_generator()
    _convert_split_sizes()
    _skip_capture_checks()


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


def _replace_torch_cuda() -> None:
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


def _share_generator() -> None:
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


def _convert_split_sizes() -> None:
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


def _skip_capture_checks() -> None:
    """Skips torch's check whether an optimizer step is being captured into a CUDA graph.

    It asks the driver as soon as `torch.cuda.is_available()` says yes.
    """
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(torch.optim.Optimizer, name, lambda self: None)
