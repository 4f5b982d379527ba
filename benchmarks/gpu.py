"""What one GPU proves and measures in under five minutes: `make gpu`. Needs no package but torch.

    python benchmarks/gpu.py [--output build/gpu] [--device cuda|cpu]

    kernels     every kernel that can be had here against fp64 on the same 16-bit inputs
    degrees     the error of head-split attention over degrees 1, 2, 4, 8, ranks played one after
                another: at degree 8 at most 1.1 times that at degree 1, or 1.6 times where ranks
                add up copies of a gradient
    offsets     gradients of a very long sample whose incoming gradient has rows so far apart that
                row times stride passes 2^31, against the same gradient made contiguous
    streams     nested attention with its exchanges on a side stream, slowed down, and memory handed
                out again at once: 100 rounds, the bits of the serial order
    profile     throughput by length, for all heads and for the heads of each degree

Writes result.json and profile.json (for --nsp-profile) into the folder and exits 1 when a check
fails. Without a GPU it says so in one line and exits 0. --device cpu runs the same code on CPU
kernels at small sizes, for its own test.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, override
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime import executor
from megatron_nsp.runtime.attention import AttentionRuntime, NestedBatch, nested_attention
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import (
    KERNELS,
    AttentionKernel,
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
    choose_kernel,
)
from megatron_nsp.runtime.profiler import GPU_EFFORT, Effort, Profiler
from megatron_nsp.testing.kernel_errors import errors_by_degree, kernel_errors
from megatron_nsp.testing.runtime import local_runtime

MOST_RELATIVE_ERROR = 0.01
"""Of 16-bit output and gradients, root of the mean square: bfloat16 rounds to 0.0017 of a value."""
MOST_LSE_ERROR = 1e-3
MOST_GROWTH = 1.1
MOST_GROWTH_OF_COPIES = 1.5
"""Of dk and dv where ranks share a key/value head: each rounds its part before they are added, as
much as a kernel that adds them rounds the sum, hence the root of two."""

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
        lengths: samples of the kernel check.
        degree_tokens: tokens of the sample whose error over the degrees is measured.
        long_rows: rows of the very long sample.
        row_stride: elements from one row of its incoming gradient to the next.
        rounds: of the stream check.
        stream_tokens: tokens of each node of the stream check; a multiple of 4.
        effort: of the profile.
        head_lengths: lengths at which fewer heads are timed.
    """

    lengths: tuple[int, ...]
    degree_tokens: int
    long_rows: int
    row_stride: int
    rounds: int
    stream_tokens: int
    effort: Effort
    head_lengths: tuple[int, ...]


GPU = Sizes(
    (1, 127, 128, 500, 1292), 8192, 300_000, 8192, 100, 4096, GPU_EFFORT, (2048, 32768, 131072)
)
CPU = Sizes((1, 7, 64, 56), 256, 300, 640, 4, 64, Effort(0.005, (16, 64), 64, (8,)), (16,))

CASES: dict[str, tuple[AttentionMask, int, int, int, int]] = {
    "causal": (AttentionMask(0.125), 8, 8, 64, 64),
    "full": (AttentionMask(0.125, is_causal=False), 8, 8, 64, 64),
    "shared keys": (AttentionMask(0.09), 8, 2, 128, 128),
    "window of 100": (AttentionMask(0.09, window_left=99), 8, 2, 128, 128),
    "latent": (AttentionMask(0.07), 8, 8, 192, 128),
    "head dim 20": (AttentionMask(0.2), 8, 2, 20, 20),
    "head dim 256": (AttentionMask(0.06), 4, 2, 256, 256),
}
"""Mask, query heads, key/value heads, head dim, value dim."""


def available_kernels(device: torch.device) -> Iterator[AttentionKernel]:
    """Every kernel that runs on `device` here; says which do not, and why."""
    for name in KERNELS:
        if name in ("auto", "reference"):
            continue
        try:
            yield choose_kernel(name, device)
        except ValueError as error:
            print(f"  left out: {error}")


def check_kernels(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Errors of output, LSE and gradients of each kernel and case; also for tails of samples."""
    table: dict[str, Any] = {}
    starts = np.concatenate([[0], np.cumsum(sizes.lengths)])
    tails = np.concatenate([[0], np.cumsum([-(-length // 2) for length in sizes.lengths])])
    shapes = {"whole": SampleBounds(starts), "tails": SampleBounds(tails, starts)}
    for kernel in available_kernels(device):
        for name, (mask, num_heads, num_kv_heads, head_dim, value_dim) in CASES.items():
            for kind, samples in shapes.items():
                torch.manual_seed(0)
                rows, keys = samples.bounds[-1], samples.kv_bounds[-1]
                dout, q, k, v = (
                    torch.randn(shape, device=device).bfloat16()
                    for shape in (
                        (rows, num_heads, value_dim),
                        (rows, num_heads, head_dim),
                        (keys, num_kv_heads, head_dim),
                        (keys, num_kv_heads, value_dim),
                    )
                )
                table[f"{kernel.name}, {name}, {kind}"] = kernel_errors(
                    kernel, dout, q, k, v, VarlenCall(samples, mask)
                )
    return table


def nested_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, batch: NestedBatch, runtime: Any
) -> list[Tensor]:
    """Output and gradients of one call of nested attention."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = nested_attention(leaves[0], leaves[1], leaves[2], batch, AttentionMask(0.125), runtime)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def one_rank(kernel: AttentionKernel, device: torch.device) -> tuple[SPTree, AttentionRuntime]:
    """A tree of one rank and its runtime."""
    tree = SPTree(1, (1,))
    groups = NestedGroups(tree, 0, 0, {})
    return tree, local_runtime(groups, kernel, overlap=False, device=device)


def check_offsets(kernel: AttentionKernel, device: torch.device, sizes: Sizes) -> dict[str, bool]:
    """Whether gradients are the same bits for a strided and a contiguous incoming gradient."""
    rows, num_heads, head_dim = sizes.long_rows, 2, 64
    if device.type == "cuda":
        # The gradient, and what a deterministic backward sums up in, one copy for each few heads.
        needed, (free, _) = 8 * rows * sizes.row_stride, torch.cuda.mem_get_info(device)
        if free < needed:
            print(f"  left out: it needs {needed} bytes of memory, {free} are free")
            return {}
    tree, runtime = one_rank(kernel, device)
    batch = NestedBatch.build(Plan.from_nodes(tree, [rows], [tree.node(1, 0)]), 0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, num_heads, head_dim, device=device).bfloat16() for _ in range(3))
    wide = torch.randn(rows, sizes.row_stride, device=device, dtype=torch.bfloat16)
    dout = wide[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    assert dout.stride(0) == sizes.row_stride and not dout.is_contiguous()
    strided = nested_gradients((q, k, v), dout, batch, runtime)
    plain = nested_gradients((q, k, v), dout.contiguous(), batch, runtime)
    same = all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))
    finite = all(bool(torch.isfinite(x).all()) for x in plain)
    call = VarlenCall(SampleBounds(np.array([0, rows])), AttentionMask(0.125))
    try:
        kernel.forward(wide[:, :128].unflatten(1, (2, 64)), k, v, call)
        refused = False
    except ValueError:
        refused = True
    return {"same bits": same, "finite": finite, "kernels refuse strides": refused}


def simulated_exchange(exchange: Exchange, rank: int, delay: Callable[[], None]) -> Tensor:
    """What a rank would receive from equal peers, after a long wait on the stream it runs on."""
    delay()
    if exchange.group is None:
        return exchange.send.clone()
    block = exchange.send.split(list(exchange.send_counts))[rank]
    assert set(exchange.recv_counts) == {len(block)}, "peers are not equal"
    return torch.cat([block] * len(exchange.recv_counts))


class NoisyKernel(AttentionKernel):
    """A kernel before which memory is handed out, spoilt and given back."""

    def __init__(self, kernel: AttentionKernel, sizes: list[int], device: torch.device) -> None:
        """Spoils tensors of these numbers of elements."""
        self.kernel, self.sizes, self.device, self.name = kernel, sizes, device, kernel.name

    def _spoil(self) -> None:
        for size in self.sizes:
            torch.full((size,), float("nan"), device=self.device, dtype=torch.bfloat16)

    @override
    def forward(
        self, q_SHD: Tensor, k_CKD: Tensor, v_CKV: Tensor, call: VarlenCall
    ) -> tuple[Tensor, Tensor]:
        self._spoil()
        return self.kernel.forward(q_SHD, k_CKD, v_CKV, call)

    @override
    def backward(
        self, dout_SHV: Tensor, state: AttentionState, call: VarlenCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._spoil()
        return self.kernel.backward(dout_SHV, state, call)


def check_streams(
    kernel: AttentionKernel, device: torch.device, sizes: Sizes
) -> dict[str, int | bool]:
    """Rounds whose bits differ from the serial order; one rank of a tree with degrees 1, 2, 4."""
    tree = SPTree(4, (1, 2, 4))
    nodes = [tree.node(degree, 0) for degree in (4, 2, 1)]
    # Every rank of a node holds the same number of tokens, so equal peers are possible.
    lengths = [sizes.stream_tokens * tree.degree(node) // 4 for node in nodes]
    plan = Plan.from_nodes(tree, lengths, nodes)
    groups: Any = {node: object() for node in nodes if tree.degree(node) > 1}
    nested_groups = NestedGroups(tree, 0, 0, groups)
    rows = NestedBatch.build(plan, 0).layout.buffer_tokens
    torch.manual_seed(0)
    inputs = tuple(torch.randn(rows, 8, 64, device=device).bfloat16() for _ in range(3))
    dout = torch.randn(rows, 8, 64, device=device).bfloat16()
    noise = [rows * 64 * factor for factor in (1, 2, 3, 8, 24)]
    noisy = NoisyKernel(kernel, noise, device)

    def delay() -> None:
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000)  # about a millisecond
        else:
            time.sleep(0.001)

    def run(is_streamed: bool) -> list[Tensor]:
        used = noisy if is_streamed else kernel
        runtime = local_runtime(nested_groups, used, overlap=is_streamed, device=device)
        batch = NestedBatch.build(plan, 0, overlap=is_streamed)
        results = nested_gradients(inputs, dout, batch, runtime)
        for _ in range(2):  # what a layer leaves is what the next one starts from
            results = nested_gradients(tuple(results[:3]), dout, batch, runtime)
        return results

    def exchange(asked: Exchange) -> Tensor:
        return simulated_exchange(asked, 0, delay)

    with mock.patch.object(executor, "run_exchange", exchange):
        serial = run(is_streamed=False)
        different = 0
        for _ in range(sizes.rounds):
            streamed = run(is_streamed=True)
            different += not all(map(torch.equal, serial, streamed))
    finite = all(bool(torch.isfinite(x).all()) for x in serial)
    return {"rounds": sizes.rounds, "different": different, "finite": finite}


def measure_profile(
    kernel: AttentionKernel, device: torch.device, sizes: Sizes, folder: Path
) -> dict[str, Any]:
    """Writes profile.json; returns throughput by number of query heads and length."""
    model = known_model("qwen3-8b")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    groups = NestedGroups(SPTree(1, (1,)), 0, 0, {})

    def profiler(heads: int, kv_heads: int, effort: Effort) -> Profiler:
        shape = replace(model, num_heads=heads, num_kv_heads=kv_heads)
        if device.type == "cpu":
            shape = replace(shape, hidden=64, ffn_hidden=64, num_layers=1, head_dim=16)
        return Profiler(
            shape, groups, kernel, device, torch.bfloat16, effort, lambda text: print(f"  {text}")
        )

    try:
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        other = load_profile("h200-ib")
        measured = profiler(model.num_heads, model.num_kv_heads, sizes.effort).measure(
            folder.name,
            f"attention, dense work, launches and optimizer measured on one {machine}, kernel "
            f"{kernel.name}, torch {torch.__version__}, sizes of {model.name}; exchanges are those "
            f"of {other.name}, an estimate",
            other.ranks_per_host,
        )
        measured = replace(
            measured,
            is_estimate=True,
            intra_bytes_per_s=other.intra_bytes_per_s,
            inter_bytes_per_s=other.inter_bytes_per_s,
        )
        (folder / "profile.json").write_text(json.dumps(measured.to_dict(), indent=1) + "\n")
        effort = replace(sizes.effort, lengths=sizes.head_lengths)
        table: dict[str, Any] = {}
        for degree in DEGREES:
            heads, kv_heads = model.num_heads // degree, max(model.num_kv_heads // degree, 1)
            rates = profiler(heads, kv_heads, effort).attention_rates()
            for length, rate in rates.items():
                table[f"{heads} heads, {length} tokens"] = {
                    "fwd_flops_per_s": rate.fwd_flops_per_s,
                    "bwd_flops_per_s": rate.bwd_flops_per_s,
                }
        return table
    finally:
        dist.destroy_process_group()


def most_growth(name: str, tensor: str) -> float:
    """By how much an error may grow with the degree: `name` is `8 key/value heads, degree 4`."""
    num_kv_heads, degree = int(name.split()[0]), int(name.split()[-1])
    is_copied = tensor in ("dk", "dv") and degree > num_kv_heads
    return MOST_GROWTH_OF_COPIES if is_copied else MOST_GROWTH


def failures(result: dict[str, Any]) -> list[str]:
    """What missed its bound."""
    missed = []
    for name, errors in result["kernels"].items():
        for tensor, error in errors.items():
            most = MOST_LSE_ERROR if tensor == "lse" else MOST_RELATIVE_ERROR
            if not error <= most:
                missed.append(f"{name}: {tensor} is off by {error:.2e}, at most {most}")
    for name, errors in result["degrees"].items():
        first = result["degrees"][name.rsplit(" ", 1)[0] + " 1"]
        for tensor, error in errors.items():
            if not error <= most_growth(name, tensor) * first[tensor]:
                missed.append(f"{name}: {tensor} is off by {error:.2e}, {first[tensor]:.2e} at 1")
    missed += [f"offsets: {name}" for name, good in result["offsets"].items() if not good]
    streams = result["streams"]
    if streams["different"] or not streams["finite"]:
        missed.append(f"streams: {streams}")
    return missed


@contextmanager
def deterministic() -> Iterator[None]:
    """Backward gives the same bits twice."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def main() -> int:
    """Runs the checks; 0 when none failed or there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", default="build/gpu", help="folder of the results")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a smoke run"
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu: there is no NVIDIA GPU here, nothing was run")
        return 0
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = CPU if device.type == "cpu" else GPU
    started = time.perf_counter()
    kernel = choose_kernel("cpu-flash" if device.type == "cpu" else "cuda-varlen", device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "kernel": kernel.name,
    }

    def section(name: str, run: Callable[[], Any]) -> None:
        print(f"{name}:", flush=True)
        begin = time.perf_counter()
        result[name] = run()
        print(f"  {time.perf_counter() - begin:.1f} s", flush=True)

    section("kernels", lambda: check_kernels(device, sizes))
    section("degrees", lambda: errors_by_degree(kernel, device, sizes.degree_tokens, DEGREES))
    with deterministic():
        section("offsets", lambda: check_offsets(kernel, device, sizes))
        section("streams", lambda: check_streams(kernel, device, sizes))
    section("profile", lambda: measure_profile(kernel, device, sizes, folder))
    missed = failures(result)
    result |= {"seconds": time.perf_counter() - started, "failures": missed}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    for line in missed:
        print(f"failed: {line}")
    print(f"{len(missed)} failures; wrote {folder}/result.json and {folder}/profile.json")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
