"""`megatron-nsp profile`: measures this machine and writes a profile for the planner.

Plain, it starts local CPU ranks; under torchrun it measures the GPUs and the network in use.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from megatron_nsp.config import NSPConfig, build_tree, check_ranges
from megatron_nsp.cost.models import MODELS, Model, known_model

_SIZES = {
    "layers": 2,
    "hidden": 128,
    "ffn_hidden": 384,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
"""Sizes without --model: those of `make demo`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    parser.add_argument("output", help="where to write the profile, a .json file")
    parser.add_argument("--name", help="name of the profile (the file's)")
    parser.add_argument("--ranks", type=int, default=4, help="local CPU ranks (%(default)s)")
    parser.add_argument("--model", metavar="NAME", help=f"a known model: {', '.join(MODELS)}")
    for name, default in _SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"({default})")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="(float32 on CPUs, bfloat16 on GPUs)"
    )
    parser.add_argument("--quick", action="store_true", help="measure briefly, for a try")


def run(args: argparse.Namespace) -> int:
    """Measures and writes.

    Raises:
        ValueError: one line naming the flag and its value.
    """
    model = _model(args)
    path = Path(args.output)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    name = args.name or path.stem
    if "WORLD_SIZE" in os.environ:
        return _under_torchrun(args, model, path, name)
    check_ranges(args, {"ranks": (1, 64)})
    _check_degrees(args.ranks, model)
    from megatron_nsp.testing.ranks import RankError, run_ranks

    try:
        profile = run_ranks(
            args.ranks, _measure_on_cpu, model, name, args.dtype, args.quick, timeout_s=300.0
        )[0]
    except RankError as error:
        lines = str(error).strip().splitlines()
        print("megatron-nsp profile:", *dict.fromkeys((lines[0], lines[-1])), file=sys.stderr)
        return 3
    _write(path, profile)
    return 0


def _model(args: argparse.Namespace) -> Model:
    given = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    check_ranges(args, dict.fromkeys(given, (1, 2**24)))
    if args.model is not None:
        if given:
            raise ValueError(
                f"--model {args.model} has sizes, --{next(iter(given)).replace('_', '-')} must "
                "not be given too"
            )
        return known_model(args.model)
    sizes = {**_SIZES, **given}
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(
            f"--heads {sizes['heads']} must be a multiple of --kv-heads {sizes['kv_heads']}"
        )
    return Model(
        name="given sizes",
        source="the command line",
        num_layers=sizes["layers"],
        hidden=sizes["hidden"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        ffn_hidden=sizes["ffn_hidden"],
        vocab_size=1,
    )


def _check_degrees(num_ranks: int, model: Model) -> None:
    build_tree(NSPConfig(), num_ranks, model.num_heads, model.num_kv_heads)


def _measure_on_cpu(rank: int, model: Model, name: str, dtype: str | None, is_quick: bool) -> dict:
    import torch

    return _measure(rank, model, name, torch.device("cpu"), dtype or "float32", is_quick)


def _measure(
    rank: int, model: Model, name: str, device: "object", dtype: str, is_quick: bool
) -> dict:
    """Measures on this rank of an initialised job; the profile as JSON values."""
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from megatron_nsp.runtime.groups import NestedGroups
    from megatron_nsp.runtime.kernels import choose_kernel
    from megatron_nsp.runtime.profiler import CPU_EFFORT, GPU_EFFORT, Profiler

    assert isinstance(device, torch.device)
    num_ranks = dist.get_world_size()
    tree = build_tree(NSPConfig(), num_ranks, model.num_heads, model.num_kv_heads)
    groups = NestedGroups.create(tree, [range(num_ranks)])
    groups.warm_up(device)
    effort = GPU_EFFORT if device.type == "cuda" else CPU_EFFORT
    if is_quick:
        effort = replace(
            effort,
            seconds=0.02,
            lengths=effort.lengths[:3],
            exchange_tokens=effort.exchange_tokens[:3],
        )

    def say(text: str) -> None:
        if rank == 0:
            print(f"  {text}", file=sys.stderr, flush=True)

    kernel = choose_kernel("auto", device)
    profiler = Profiler(model, groups, kernel, device, getattr(torch, dtype), effort, say)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    provenance = (
        f"measured on {num_ranks} ranks of {machine}, {ranks_per_host} a host, {os.cpu_count()} "
        f"cores, backend {dist.get_backend()}, kernel {kernel.name}, {dtype}, torch "
        f"{torch.__version__}; sizes of {model.name}: hidden {model.hidden}, {model.num_heads} "
        f"and {model.num_kv_heads} heads of {model.head_dim}"
    )
    return profiler.measure(name, provenance, ranks_per_host).to_dict()


def _under_torchrun(args: argparse.Namespace, model: Model, path: Path, name: str) -> int:
    import torch
    import torch.distributed as dist

    _check_degrees(int(os.environ["WORLD_SIZE"]), model)
    is_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    dtype = args.dtype or ("bfloat16" if is_gpu else "float32")
    profile = _measure(dist.get_rank(), model, name, device, dtype, args.quick)
    if dist.get_rank() == 0:
        _write(path, profile)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _write(path: Path, profile: dict) -> None:
    path.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
    worst = max(profile["residuals"].values(), default=0.0)
    places = {"intra_bytes_per_s": "inside a host", "inter_bytes_per_s": "between hosts"}
    missing = [where for name, where in places.items() if profile[name] is None]
    print(
        f"wrote {path}: {profile['provenance']}; largest residual {100 * worst:.0f}%"
        + f"; no exchanges {', '.join(missing)}: not measured" * bool(missing)
    )
