"""Stand-ins for the attention packages: what they take is bound to the recorded signatures, what
they give is computed by the definition.

Each does as its package does where packages differ: how masks align, which head dims it takes, the
order of arguments, what is returned and what written in place, and the form of the LSE.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels import AttentionKernel, VarlenCall, kernel_class
from tests.dist import recorded_signatures as recorded
from tests.dist.package_calls import (
    Arguments,
    Package,
    bounds_of,
    check_dims,
    gradients,
    mask_of,
    output,
    tensors,
)
from tests.dist.te_packages import te, te_module


def flash_attn_2(package: Package) -> dict[str, dict[str, Any]]:
    def call_of(a: Arguments) -> VarlenCall:
        left, right = a["window_size_left"], a["window_size_right"]
        return VarlenCall(bounds_of(a), mask_of(a["softmax_scale"], a["causal"], left, right))

    def forward(a: Arguments) -> tuple:
        check_dims(a)
        assert a["dropout_p"] == 0.0
        return *output(a, call_of(a)), torch.empty(0), torch.empty(2)

    def backward(a: Arguments) -> Tensor:
        check_dims(a)
        assert a["dropout_p"] == a["softcap"] == 0.0 and a["alibi_slopes"] is None
        grads = gradients(a, call_of(a), "dout q k v out softmax_lse")
        for place, grad in zip(tensors(a, "dq", "dk", "dv"), grads, strict=True):
            place.copy_(grad)
        return torch.empty(0)

    return {
        "flash_attn": {},
        "flash_attn.flash_attn_interface": {
            "_flash_attn_varlen_forward": package.function(recorded.FLASH_ATTN_2_FORWARD, forward),
            "_flash_attn_varlen_backward": package.function(
                recorded.FLASH_ATTN_2_BACKWARD, backward
            ),
        },
    }


def _wide_keys(head_dim: int, value_dim: int) -> bool:
    return 128 < head_dim <= 192 and 96 < value_dim <= 128


def flash_attn_3(package: Package, is_first: bool) -> dict[str, dict[str, Any]]:
    """The first interface takes the window as a pair; the second calls the mask of backward
    `is_causal` and is a torch operator, whose signature cannot be seen.
    """

    def window(a: Arguments) -> tuple[int, int]:
        return a["window_size"] if is_first else (a["window_size_left"], a["window_size_right"])

    def forward(a: Arguments) -> tuple:
        check_dims(a, _wide_keys)
        assert all(a[name] is None for name in ("k_new", "qv", "seqused_q", "page_table"))
        mask = mask_of(a["softmax_scale"], a["causal"], *window(a))
        return *output(a, VarlenCall(bounds_of(a), mask)), torch.empty(0), torch.empty(0)

    def backward(a: Arguments) -> Tensor:
        check_dims(a, _wide_keys)
        causal = a["causal"] if is_first else a["is_causal"]
        mask = mask_of(a["softmax_scale"], causal, *window(a))
        call = VarlenCall(bounds_of(a), mask)
        grads = gradients(a, call, "dout q k v out softmax_lse")
        for place, grad in zip(tensors(a, "dq", "dk", "dv"), grads, strict=True):
            place.copy_(grad)
        return torch.empty(0)

    order = "FIRST" if is_first else "SECOND"
    signatures = [
        getattr(recorded, f"FLASH_ATTN_3_{order}_{way}") for way in ("FORWARD", "BACKWARD")
    ]
    functions = [
        package.function(signature, compute)
        for signature, compute in zip(signatures, (forward, backward), strict=True)
    ]
    if not is_first:
        for function in functions:
            del function.__signature__  # type: ignore[attr-defined]
    names = ("_flash_attn_forward", "_flash_attn_backward")
    return {"flash_attn_interface": dict(zip(names, functions, strict=True))}


def flash_attn_4(package: Package) -> dict[str, dict[str, Any]]:
    """A side of the window without a limit is None; above a head dim of 128 little is left."""

    def check(a: Arguments) -> VarlenCall:
        check_dims(a, lambda d, v: (d, v) == (192, 128))
        dims = (a["q"].shape[2], a["v"].shape[2])
        assert max(dims) <= 128 or dims in ((192, 128), (256, 256)), dims
        left, right = a["window_size_left"], a["window_size_right"]
        mask = mask_of(
            a["softmax_scale"],
            a["causal"],
            -1 if left is None else left,
            -1 if right is None else right,
        )
        return VarlenCall(bounds_of(a), mask)

    def forward(a: Arguments) -> tuple:
        call = check(a)
        assert a["return_lse"], "without gradients it gives no LSE unless asked"
        return *output(a, call), None, None, None

    def backward(a: Arguments) -> tuple:
        return gradients(a, check(a), "dout q k v out lse")

    return {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {
            "_flash_attn_fwd": package.function(recorded.FLASH_ATTN_4_FORWARD, forward),
            "_flash_attn_bwd": package.function(recorded.FLASH_ATTN_4_BACKWARD, backward),
        },
    }


OPERATORS = "torch.ops.torch_attn"


def cuda_varlen(package: Package) -> dict[str, dict[str, Any]]:
    """torch's own operators, by the schemas of the torch that is here."""
    import torch.nn.attention.varlen  # registers them

    def call_of(a: Arguments) -> VarlenCall:
        a = a | {"q": a["query"], "k": a["key"], "v": a["value"]}
        check_dims(a)
        names = {"cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k"}
        names |= {"max_seqlen_q": "max_q", "max_seqlen_k": "max_k"}
        samples = bounds_of(a | {ours: a[theirs] for ours, theirs in names.items()})
        # The window alone decides: is_causal has no say where one is given.
        assert a["is_causal"] == (a["window_size"][1] == 0)
        return VarlenCall(samples, mask_of(a["scale"], False, *a["window_size"]))

    def forward(a: Arguments) -> tuple:
        assert a["enable_gqa"] == (a["query"].shape[1] != a["key"].shape[1])
        return *output(a, call_of(a), "query key value"), torch.empty(2)

    def backward(a: Arguments) -> tuple:
        assert a["rng_state"].shape == (2,)
        return gradients(a, call_of(a), "grad_out query key value out lse")

    functions = {}
    for name, compute in (("_varlen_attn", forward), ("_varlen_attn_backward", backward)):
        schema = getattr(torch.ops.torch_attn, name).default._schema
        parameters = [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY
                if argument.kwarg_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value
                if argument.has_default_value()
                else inspect.Parameter.empty,
            )
            for argument in schema.arguments
        ]
        functions[name] = package.function(inspect.Signature(parameters), compute)
    return {OPERATORS: functions}


PACKAGES: dict[str, tuple[str, Callable[[Package], dict[str, dict[str, Any]]]]] = {
    "cuda-varlen": ("cuda-varlen", cuda_varlen),
    "flash-attn-2": ("flash-attn-2", flash_attn_2),
    "flash-attn-3, first": ("flash-attn-3", lambda package: flash_attn_3(package, is_first=True)),
    "flash-attn-3, second": (
        "flash-attn-3",
        lambda package: flash_attn_3(package, is_first=False),
    ),
    "flash-attn-4": ("flash-attn-4", flash_attn_4),
    "te, packed": ("te", lambda package: te(package, is_packed=True)),
    "te, by sample": ("te", lambda package: te(package, is_packed=False)),
    "te-module": ("te-module", te_module),
}
"""By what is tested: the kernel's name and the modules of its package."""


@contextmanager
def installed(modules: dict[str, dict[str, Any]]) -> Iterator[None]:
    """These modules are all of the attention packages that can be imported."""
    modules = dict(modules)
    operators = modules.pop(OPERATORS, {})
    roots = ("flash_attn", "flash_attn_interface", "transformer_engine")
    hidden = [name for name in sys.modules if name.split(".")[0] in roots]
    kept = {name: sys.modules.pop(name) for name in hidden}
    # None in sys.modules makes an import fail even where the real package is installed.
    sys.modules.update(dict.fromkeys(roots))  # type: ignore[arg-type]
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(contents)
        sys.modules[name] = module
    try:
        with ExitStack() as patches:
            for name, operator in operators.items():
                patches.enter_context(mock.patch.object(torch.ops.torch_attn, name, operator))
            yield
    finally:
        for name in [*roots, *modules]:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def kernel_of(name: str) -> AttentionKernel:
    """A kernel on CPU tensors, which `choose_kernel` would refuse."""
    return kernel_class(name)()
