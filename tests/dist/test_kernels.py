"""The CPU kernel against the definition, and the definition against autograd's own derivative."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_nsp.runtime import kernels
from megatron_nsp.runtime.kernels import (
    KERNELS,
    AttentionKernel,
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
    choose_kernel,
    kernel_class,
    takes_32_bits,
)
from megatron_nsp.runtime.kernels.base import hidden_keys
from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel
from megatron_nsp.runtime.kernels.reference import ReferenceKernel
from megatron_nsp.runtime.kernels.sink import add_sink, sink_gradient

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
BOUNDS = SampleBounds(np.array([0, 1, 8, 8 + 65]))


def inputs(num_kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(73, heads, 16, dtype=dtype) for heads in (4, 4, num_kv_heads, num_kv_heads)]


MASKS = {
    "causal": AttentionMask(0.25),
    "full": AttentionMask(0.25, is_causal=False),
    "window 8": AttentionMask(0.25, window_left=7),
    "itself alone": AttentionMask(0.25, window_left=0),
}


def both_kernels(tensors: list[torch.Tensor], call: VarlenCall) -> list[tuple[torch.Tensor, ...]]:
    """Output, LSE and gradients of the CPU kernel and of the definition."""
    dout, q, k, v = tensors
    results = []
    for kernel in (CpuFlashKernel(), ReferenceKernel()):
        out, lse = kernel.forward(q, k, v, call)
        state = AttentionState(q, k, v, out, lse)
        results.append((out, lse, *kernel.backward(dout, state, call)))
    return results


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_cpu_flash_equals_the_definition(num_kv_heads: int, mask: AttentionMask) -> None:
    results = both_kernels(inputs(num_kv_heads, torch.float64), VarlenCall(BOUNDS, mask))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_queries_that_are_the_tail_of_their_keys(mask: AttentionMask) -> None:
    """Rows of a longer call: the tail's output is that of the whole sample's last rows."""
    dout, q, k, v = inputs(2, torch.float64)
    tails = [slice(0, 1), slice(5, 8), slice(20, 73)]
    rows = torch.cat([torch.arange(73)[rows] for rows in tails])
    samples = SampleBounds(np.array([0, 1, 4, 57]), np.array([0, 1, 8, 73]))
    whole, _ = ReferenceKernel().forward(q, k, v, VarlenCall(BOUNDS, mask))
    results = both_kernels([dout[rows], q[rows], k, v], VarlenCall(samples, mask))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(results[0][0], whole[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_may_have_another_head_dim(value_dim: int) -> None:
    _, q, k, _ = inputs(2, torch.float64)
    dout, v = torch.randn(73, 4, value_dim).double(), torch.randn(73, 2, value_dim).double()
    results = both_kernels([dout, q, k, v], VarlenCall(BOUNDS, MASKS["causal"]))
    assert results[0][0].shape == dout.shape
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_sinks_have_the_derivative_of_one_more_score(mask: AttentionMask) -> None:
    dout, q, k, v = inputs(4, torch.float64)
    sink = torch.randn(4).double()
    kernel, call = CpuFlashKernel(), VarlenCall(BOUNDS, mask)
    out, lse = add_sink(*kernel.forward(q, k, v, call), sink)
    grads = [*kernel.backward(dout, AttentionState(q, k, v, out, lse), call)]
    grads.append(sink_gradient(dout, out, lse, sink))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    outs = []
    for rows in BOUNDS.slices:
        a, b, c = (x[rows].transpose(0, 1) for x in leaves[:3])
        scores = a @ b.transpose(1, 2) * 0.25
        hidden = hidden_keys(a.shape[1], a.shape[1], mask, CPU)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        one_more = leaves[3][:, None, None].expand(-1, a.shape[1], 1)
        probs = torch.softmax(torch.cat([scores, one_more], dim=2), dim=2)[..., :-1]
        outs.append((probs @ c).transpose(0, 1))
    torch.cat(outs).backward(dout)
    torch.testing.assert_close(torch.cat(outs), out, rtol=0, atol=1e-12)
    for grad, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=1e-12)


def test_a_window_needs_a_causal_mask() -> None:
    with pytest.raises(ValueError, match="needs a causal mask and at least 0 tokens, got 4"):
        AttentionMask(1.0, is_causal=False, window_left=4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_definition_has_the_derivative_it_says(is_causal: bool) -> None:
    dout, q, k, v = inputs(2, torch.float64)
    call, kernel = VarlenCall(BOUNDS, AttentionMask(0.25, is_causal)), ReferenceKernel()
    out, lse = kernel.forward(q, k, v, call)
    grads = kernel.backward(dout, AttentionState(q, k, v, out, lse), call)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    outs = []
    for rows in BOUNDS.slices:
        a, b, c = (x[rows].transpose(0, 1) for x in leaves)
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(
                a, b, c, is_causal=is_causal, scale=0.25, enable_gqa=True
            ).transpose(0, 1)
        )
    torch.cat(outs).backward(dout)
    torch.testing.assert_close(torch.cat(outs), out, rtol=0, atol=1e-12)
    for grad, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=1e-12)


def test_uneven_heads_and_unknown_kernels_are_refused() -> None:
    q, k = torch.ones(8, 7, 4), torch.ones(8, 2, 4)
    call = VarlenCall(SampleBounds(np.array([0, 8])), AttentionMask(1.0))
    for kernel in (CpuFlashKernel(), ReferenceKernel()):
        with pytest.raises(ValueError, match="7 query heads are no multiple of 2"):
            kernel.forward(q, k, k, call)
    with pytest.raises(ValueError, match=r"must be one of auto, .* got triton"):
        choose_kernel("triton", CPU)
    with pytest.raises(ValueError, match="cuda-varlen runs on cuda tensors"):
        choose_kernel("cuda-varlen", CPU)
    assert [choose_kernel(name, CPU).name for name in ("auto", "cpu-flash", "reference")] == [
        "cpu-flash",
        "cpu-flash",
        "reference",
    ]


def kernels_of_the_folder(of: type) -> Iterator[type[AttentionKernel]]:
    for each in of.__subclasses__():
        if each.__module__.startswith(kernels.__name__) and not inspect.isabstract(each):
            yield each
        yield from kernels_of_the_folder(each)


def test_every_kernel_of_the_folder_can_be_asked_for() -> None:
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    found = [each.name for each in kernels_of_the_folder(AttentionKernel)]
    assert sorted(["auto", *found]) == sorted(KERNELS)


def test_the_docs_say_of_every_kernel_where_it_runs() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", DOCS.read_text(), re.MULTILINE)
    assert sorted(["auto", *(name for name, _ in rows)]) == sorted(KERNELS)
    for name, runs_on in rows:
        needs = kernel_class(name).needs
        least = f"{needs.least[0]}.{needs.least[1]} and later"
        on_gpus = least if needs.last is None else f"{needs.last}.x"
        assert runs_on == {"cpu": "CPU ranks", None: "any"}.get(needs.device, on_gpus), name


def test_kernels_for_gpus_take_16_bits() -> None:
    assert {name for name in KERNELS if takes_32_bits(name)} == {"cpu-flash", "reference"}


def test_the_private_operator_still_has_the_schema_we_call() -> None:
    schema = str(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema)
    assert (
        "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale"
        in schema
    )


@pytest.mark.parametrize("kernel", [CpuFlashKernel(), ReferenceKernel()])
def test_strided_inputs_are_refused(kernel: CpuFlashKernel | ReferenceKernel) -> None:
    dout, q, k, v = inputs(4, torch.float64)
    call = VarlenCall(BOUNDS, AttentionMask(0.25))
    strided = k.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match=r"kernel input 1 .* not contiguous"):
        kernel.forward(q, strided, v, call)
    out, lse = kernel.forward(q, k, v, call)
    with pytest.raises(ValueError, match=r"kernel input 2 .* not contiguous"):
        kernel.backward(dout, AttentionState(q, strided, v, out, lse), call)


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_16_bits_run_whatever_vector_instructions_torch_is_told_to_use(capability: str) -> None:
    """Long enough for the operator to pack keys where a processor has AMX."""
    script = (
        "import numpy as np, torch\n"
        "from megatron_nsp.runtime.kernels import *\n"
        "from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel\n"
        "torch.manual_seed(0)\n"
        "dout, q, k, v = (torch.randn(300, 4, 32).bfloat16() for _ in range(4))\n"
        "call = VarlenCall(SampleBounds(np.array([0, 300])), AttentionMask(0.2))\n"
        "for kind in (torch.bfloat16, torch.float32):\n"
        "    g, *x = (t.to(kind) for t in (dout, q, k, v))\n"
        "    out, lse = CpuFlashKernel().forward(*x, call)\n"
        "    grads = CpuFlashKernel().backward(g, AttentionState(*x, out, lse), call)\n"
        "    print([float(t.double().norm()) for t in (out, lse, *grads)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    narrow, wide = (json.loads(line) for line in done.stdout.splitlines())
    assert narrow == pytest.approx(wide, rel=1e-2) and narrow[1] == wide[1]
