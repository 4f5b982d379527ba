"""The recorded signatures are those of the packages that are installed here."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformer_engine.pytorch  # noqa: F401 - it looks at every module that is there already
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_nsp.runtime.kernels import (
    AttentionMask,
    AttentionState,
    SampleBounds,
    VarlenCall,
)
from megatron_nsp.runtime.kernels.flash_attn2 import FlashAttn2Kernel
from megatron_nsp.runtime.kernels.flash_attn4 import FlashAttn4Kernel
from megatron_nsp.runtime.kernels.te import TeKernel
from tests.dist import recorded_signatures as recorded

SOURCES = Path(sys.prefix) / "flash-attn"
"""Where scripts/te_venv.sh unpacks the sources of flash-attn 2, with flash-attn 3 in hopper."""


@contextmanager
def source_folder(folder: Path, stand_ins: dict[str, Any]) -> Iterator[None]:
    """Imports come from `folder` first; the extensions, which are not built, are stood in for."""
    roots = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_2_cuda")
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] in roots}
    sys.path.insert(0, str(folder))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [*sys.modules]:
            if name.split(".")[0] in roots:
                del sys.modules[name]
        sys.modules.update(kept)


@pytest.fixture(scope="module")
def flash_attn_2() -> ModuleType:
    """Loaded once, since it registers operators, and taken out of the way of flash-attn 4."""
    with source_folder(SOURCES, {"flash_attn_2_cuda": mock.MagicMock()}):
        return importlib.import_module("flash_attn.flash_attn_interface")


def bare(function: Callable) -> inspect.Signature:
    """Names, kinds and defaults; annotations are left out."""
    function = getattr(function, "_init_fn", function)  # what a torch operator was made from
    signature = inspect.signature(function)
    return inspect.Signature(
        [
            each.replace(annotation=inspect.Parameter.empty)
            for each in signature.parameters.values()
            if each.name != "self"
        ]
    )


def test_flash_attn_2(flash_attn_2: ModuleType) -> None:
    forward, backward = (
        getattr(flash_attn_2, f"_flash_attn_varlen_{way}") for way in ("forward", "backward")
    )
    assert bare(forward) == recorded.FLASH_ATTN_2_FORWARD
    assert bare(backward) == recorded.FLASH_ATTN_2_BACKWARD


def test_flash_attn_2_runs_our_calls_on_fake_tensors(
    flash_attn_2: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operators check what they are given and say what they give back."""
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_attn_2)
    kernel = FlashAttn2Kernel()
    samples = SampleBounds(np.array([0, 3, 10]), np.array([0, 5, 16]))
    call = VarlenCall(samples, AttentionMask(0.25, window_left=3))
    with FakeTensorMode():
        q = torch.empty(10, 8, 20, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.empty(16, 2, 20, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out, lse = kernel.forward(q, k, v, call)
        assert out.shape == q.shape and (lse.shape, lse.dtype) == ((8, 10), torch.float32)
        grads = kernel.backward(out, AttentionState(q, k, v, out, lse), call)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_flash_attn_3_first_interface() -> None:
    package = ModuleType("flash_attn_3")
    stand_ins = {"flash_attn_3": package, "flash_attn_3._C": ModuleType("flash_attn_3._C")}
    with source_folder(SOURCES / "hopper", stand_ins):
        module = importlib.import_module("flash_attn_interface")
        assert bare(module._flash_attn_forward) == recorded.FLASH_ATTN_3_FIRST_FORWARD
        assert bare(module._flash_attn_backward) == recorded.FLASH_ATTN_3_FIRST_BACKWARD


def test_te_calls_the_second_interface_of_flash_attn_3_as_we_do() -> None:
    """It is in no package index; TE's own calls are the nearest witness."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    source = Path(context_parallel.__file__).read_text()
    for call in ('["window_size_left"]', '["window_size_right"]', '["is_causal"]'):
        assert call in source
    placed = context_parallel.get_fa_args(True, True, "thd", 1, 2, 3, 4)
    names = list(recorded.FLASH_ATTN_3_SECOND_FORWARD.parameters)[3:]
    given = {name: value for name, value in zip(names, placed, strict=False) if value}
    assert given == {
        "cu_seqlens_q": 1,
        "cu_seqlens_k": 2,
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    placed = context_parallel.get_fa_args(False, True, "thd", 1, 2, 3, 4, 5, 6, 7)
    names = list(recorded.FLASH_ATTN_3_SECOND_BACKWARD.parameters)[6:]
    given = {name: value for name, value in zip(names, placed, strict=False) if value}
    assert list(given) == [
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dq", "dk", "dv")
    ]


def test_flash_attn_4() -> None:
    from flash_attn.cute import interface

    assert bare(interface._flash_attn_fwd) == recorded.FLASH_ATTN_4_FORWARD
    assert bare(interface._flash_attn_bwd) == recorded.FLASH_ATTN_4_BACKWARD


def test_flash_attn_4_reads_our_windows_as_we_mean_them() -> None:
    """Causal, whether local, left, right: None is no limit."""
    from flash_attn.cute.interface import _resolve_causal_local_window as resolve

    assert resolve(True, None, None) == (True, False, None, None)
    assert resolve(False, None, None) == (False, False, None, None)
    assert resolve(True, 4, None) == (False, True, 4, 0)
    # What the older packages take for no limit would be a window here.
    assert resolve(True, -1, 0) == (False, True, -1, 0)


@pytest.mark.parametrize("dims", [(20, 20), (128, 128), (192, 128), (160, 160), (256, 256)])
@pytest.mark.parametrize("capability", [9, 10, 11])
def test_flash_attn_4_takes_the_head_dims_we_pad_to(dims: tuple, capability: int) -> None:
    from flash_attn.cute.interface import _validate_head_dims

    _validate_head_dims(*FlashAttn4Kernel().head_dims(*dims), capability, 8)


def test_transformer_engine() -> None:
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd

    assert bare(fused_attn_fwd) == recorded.TE_FORWARD
    assert bare(fused_attn_bwd) == recorded.TE_BACKWARD
    assert bare(DotProductAttention.__init__) == recorded.TE_MODULE
    assert bare(inspect.unwrap(DotProductAttention.forward)) == recorded.TE_MODULE_FORWARD
    *others, last = bare(DotProductAttention.set_context_parallel_group).parameters.values()
    named = last.replace(default=last.default.name)
    assert inspect.Signature([*others, named]) == recorded.TE_MODULE_SET_GROUP


def test_the_extension_of_transformer_engine_takes_our_arguments() -> None:
    """It gets as far as missing the GPU; arguments it cannot take are a TypeError before that."""
    kernel = TeKernel()
    call = VarlenCall(SampleBounds(np.array([0, 5, 20])), AttentionMask(0.125))
    kernel.are_stats_packed = True
    q, k = (torch.zeros(20, heads, 64, dtype=torch.bfloat16) for heads in (8, 2))
    with pytest.raises(RuntimeError, match="CUDA"):
        kernel.forward(q, k, k, call)
    with pytest.raises(RuntimeError, match="CUDA"):
        kernel.backward(q, AttentionState(q, k, k, q, torch.zeros(8, 20)), call)
