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
run under it; kernels for GPUs do not, and `args.py` lists the settings that avoid them.
"""

import importlib
import logging
import os
import socket
import sys

import torch

from megatron_nsp.mcore.cpu.device_mode import CpuDeviceMode, active_mode, keep_in_backward
from megatron_nsp.mcore.cpu.stand_ins import put_stand_ins


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
    active = active_mode()
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
    put_stand_ins()
    if float64:
        torch.set_default_dtype(torch.float64)
    # Entered for the rest of the process: there is no moment at which Megatron may see a GPU again.
    mode = CpuDeviceMode(float64)
    mode.__enter__()
    keep_in_backward(mode)
    _patch_megatron()


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


def _patch_megatron() -> None:
    """Changes the few things in Megatron that no stand-in for torch can reach."""
    # Imported here, not above: decorators of these modules read the environment set before.
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from megatron_nsp.mcore.fixes.torch_adam import make_checkpoints_loadable

    # NCCL options cannot be given to a gloo group; FSDP asks for high-priority streams by itself.
    parallel_state.get_nccl_options = lambda pg_name, nccl_comm_cfgs: None

    # The tracker warns when the CPU generator moves inside a fork. Here that is the forked one.
    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logging.getLogger(random.__name__).addFilter(keep)
    make_checkpoints_loadable()  # the inner optimizer is always torch's own here
