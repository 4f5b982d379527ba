"""Our calls of flash-attn and Transformer Engine, bound to their recorded signatures and computed
by the definition: a call that they would not take, or would take for something else, fails here.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_nsp.runtime.kernels import (
    AttentionKernel,
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
    choose_kernel,
    require_lse,
)
from megatron_nsp.runtime.kernels.reference import ReferenceKernel
from megatron_nsp.runtime.kernels.sink import add_sink
from tests.dist.kernel_packages import PACKAGES, installed, kernel_of
from tests.dist.package_calls import Package

CUDA = torch.device("cuda")
WHOLE = SampleBounds(np.array([0, 1, 8, 20]))
TAILS = SampleBounds(np.array([0, 1, 4, 9]), np.array([0, 1, 8, 20]))
CAUSAL = AttentionMask(0.3)

# samples, mask, query heads, key/value heads, head dim, value dim
CASES = {
    "causal": (WHOLE, CAUSAL, 4, 4, 16, 16),
    "full": (WHOLE, AttentionMask(0.3, is_causal=False), 4, 4, 16, 16),
    "shared keys": (WHOLE, CAUSAL, 6, 2, 16, 16),
    "window": (WHOLE, AttentionMask(0.3, window_left=4), 4, 2, 16, 16),
    "itself alone": (WHOLE, AttentionMask(0.3, window_left=0), 4, 2, 16, 16),
    "tails": (TAILS, CAUSAL, 4, 2, 16, 16),
    "tails in a window": (TAILS, AttentionMask(0.3, window_left=4), 4, 2, 16, 16),
    "tails, full": (TAILS, AttentionMask(0.3, is_causal=False), 4, 2, 16, 16),
    "head dim 20": (WHOLE, CAUSAL, 4, 2, 20, 20),
    "small values": (WHOLE, CAUSAL, 4, 2, 16, 8),
    "large values": (WHOLE, CAUSAL, 4, 2, 8, 12),
    "latent": (WHOLE, CAUSAL, 2, 2, 192, 128),
    "head dim 160": (WHOLE, CAUSAL, 2, 2, 160, 160),
    "head dim 256": (WHOLE, CAUSAL, 2, 2, 256, 256),
}


def inputs(case: tuple) -> list[Tensor]:
    """dout, q, k, v, each in the middle of a buffer, as the rows of a node are."""
    samples, _, num_heads, num_kv_heads, head_dim, value_dim = case
    rows, keys = samples.bounds[-1], samples.kv_bounds[-1]
    torch.manual_seed(0)
    shapes = [
        (rows, num_heads, value_dim),
        (rows, num_heads, head_dim),
        (keys, num_kv_heads, head_dim),
        (keys, num_kv_heads, value_dim),
    ]
    return [torch.randn(1 + n, *rest, dtype=torch.float64)[1:] for n, *rest in shapes]


@pytest.fixture
def package() -> Package:
    return Package()


@pytest.fixture(params=PACKAGES)
def kernel(request: pytest.FixtureRequest, package: Package) -> Iterator[AttentionKernel]:
    """A kernel whose package is a stand-in."""
    name, make = PACKAGES[request.param]
    with installed(make(package)):
        yield kernel_of(name)


@pytest.mark.parametrize("name", CASES)
def test_calls_mean_what_the_definition_means(
    kernel: AttentionKernel, package: Package, name: str
) -> None:
    call = VarlenCall(*CASES[name][:2])
    dout, q, k, v = inputs(CASES[name])
    results: list[list[Tensor]] = []
    for each in (kernel, ReferenceKernel()):
        out, lse = each.forward(q, k, v, call)
        assert out.is_contiguous() and out.shape == dout.shape
        if each.returns_lse:
            assert lse.is_contiguous()
        grads = each.backward(dout, AttentionState(q, k, v, out, lse), call)
        results.append([out, *grads, *([lse] if kernel.returns_lse else [])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    # Without LSE the output is computed again.
    assert len(package.calls) == 2


def test_backward_takes_the_output_and_lse_of_more_keys(kernel: AttentionKernel) -> None:
    """As for a block of a ring, a saved node, a sink: not what its own forward gave."""
    if not kernel.returns_lse:  # who needs it is refused
        with pytest.raises(ValueError, match=f"{kernel.name} gives no LSE, which a ring needs"):
            require_lse(kernel, "a ring")
        return
    call = VarlenCall(*CASES["window"][:2])
    dout, q, k, v = inputs(CASES["window"])
    out, lse = kernel.forward(q, k, v, call)
    out, lse = add_sink(out, lse, torch.randn(4, dtype=torch.float64))
    grads = kernel.backward(dout, AttentionState(q, k, v, out, lse), call)
    expected = ReferenceKernel().backward(dout, AttentionState(q, k, v, out, lse), call)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_same_bits_are_asked_for_where_torch_asks(
    kernel: AttentionKernel, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = VarlenCall(*CASES["causal"][:2])
    dout, q, k, v = inputs(CASES["causal"])
    out, lse = kernel.forward(q, k, v, call)
    for is_wanted in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda w=is_wanted: w)
        kernel.backward(dout, AttentionState(q, k, v, out, lse), call)
        # The module asks torch itself when it is made.
        assert package.calls[-1].get("deterministic", is_wanted) == is_wanted


def test_flash_attn_3_is_not_deterministic_on_wide_heads(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = VarlenCall(*CASES["head dim 256"][:2])
    dout, q, k, v = inputs(CASES["head dim 256"])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with installed(PACKAGES["flash-attn-3, second"][1](package)):
        kernel = kernel_of("flash-attn-3")
        out, lse = kernel.forward(q, k, v, call)
        with pytest.raises(ValueError, match="deterministic below head dim 256 only, got 256"):
            kernel.backward(dout, AttentionState(q, k, v, out, lse), call)


def test_uneven_heads_and_strides_are_refused(kernel: AttentionKernel) -> None:
    call = VarlenCall(WHOLE, CAUSAL)
    _, q, k, v = inputs(CASES["causal"])
    with pytest.raises(ValueError, match="4 query heads are no multiple of 3"):
        kernel.forward(q, k[:, :3].contiguous(), v[:, :3].contiguous(), call)
    with pytest.raises(ValueError, match=r"kernel input 0 .* not contiguous"):
        kernel.forward(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, call)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A GPU of the capability in the list."""
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability[0])
    return capability


MISSING = {
    "flash-attn-2": r"flash_attn.flash_attn_interface \(flash-attn 2\)",
    "flash-attn-3": r"flash_attn_interface \(flash-attn 3\)",
    "flash-attn-4": r"flash_attn.cute \(flash-attn-4\)",
    "te": r"transformer_engine.pytorch \(transformer-engine\)",
    "te-module": r"transformer_engine.pytorch \(transformer-engine\)",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_package_is_named(name: str) -> None:
    with installed({}), pytest.raises(ValueError, match=MISSING[name]) as caught:
        choose_kernel(name, CUDA)
    assert str(caught.value).startswith(f"--nsp-kernel {name} needs the package ")
    assert str(caught.value).endswith(", which is not installed")
    assert "\n" not in str(caught.value)


def test_a_package_that_does_not_load_is_named(package: Package) -> None:
    modules = PACKAGES["flash-attn-2"][1](package)
    del modules["flash_attn.flash_attn_interface"]["_flash_attn_varlen_forward"]
    message = (
        r"--nsp-kernel flash-attn-2: .* is installed but does not load: cannot import name '_fl"
    )
    with installed(modules), pytest.raises(ValueError, match=message):
        choose_kernel("flash-attn-2", CUDA)


def test_an_old_transformer_engine_is_named(package: Package) -> None:
    modules = PACKAGES["te, packed"][1](package)
    modules["transformer_engine.pytorch.cpp_extensions.fused_attn"]["fused_attn_bwd"] = print
    message = r"--nsp-kernel te: .* does not load: its fused attention is .* version before 2\.15"
    with installed(modules), pytest.raises(ValueError, match=message):
        choose_kernel("te", CUDA)


def test_a_gpu_of_the_wrong_kind_is_named(gpu: list, package: Package) -> None:
    with installed(PACKAGES["flash-attn-3, first"][1](package)):
        for capability in ((8, 9), (10, 0)):
            gpu[0] = capability
            with pytest.raises(ValueError, match=f"from 9.0 to 9.x, this one has {capability[0]}."):
                choose_kernel("flash-attn-3", CUDA)
        gpu[0] = (9, 0)
        assert choose_kernel("flash-attn-3", CUDA).name == "flash-attn-3"


def preferred(*packages: str) -> str:
    modules: dict = {}
    for name in packages:
        modules |= PACKAGES[name][1](Package())
    with installed(modules):
        return choose_kernel("auto", CUDA).name


def test_auto_takes_the_first_installed_that_runs(
    gpu: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = ("flash-attn-2", "flash-attn-3, first", "flash-attn-4")
    assert preferred() == "cuda-varlen"
    assert preferred(*flash, "te, packed") == "te"
    assert preferred(*flash) == "flash-attn-3"
    assert preferred("flash-attn-2", "flash-attn-4") == "flash-attn-4"
    assert preferred("flash-attn-2") == "flash-attn-2"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert preferred(*flash, "te, packed") == "flash-attn-3"
    gpu[0] = (10, 0)
    assert preferred(*flash, "te, packed") == "te"
    assert preferred(*flash) == "flash-attn-4"
    gpu[0] = (8, 0)
    assert preferred(*flash, "te, packed") == "flash-attn-2"
    assert preferred("flash-attn-4", "te, packed") == "te"
    assert preferred("flash-attn-4") == "cuda-varlen"


def test_kernels_without_lse_are_refused_where_one_is_needed(package: Package) -> None:
    with installed(PACKAGES["te-module"][1](package)):
        kernel = kernel_of("te-module")
    with pytest.raises(ValueError, match="te-module gives no LSE, which --nsp-save-budget-gb 2 ne"):
        require_lse(kernel, "--nsp-save-budget-gb 2")
    require_lse(ReferenceKernel(), "--nsp-save-budget-gb 2")


def test_sinks_cannot_be_added_without_lse(package: Package) -> None:
    call = VarlenCall(*CASES["causal"][:2])
    _, q, k, v = inputs(CASES["causal"])
    with installed(PACKAGES["te-module"][1](package)):
        out, lse = kernel_of("te-module").forward(q, k, v, call)
    with pytest.raises(ValueError, match="need the LSE of all 20 rows, the kernel gives 0"):
        add_sink(out, lse, torch.zeros(4))
