"""What a check of a command line takes for granted where it is not there: a GPU and its packages.

Megatron asks for the compute capability of the GPU and the version of Transformer Engine while it
validates flags. On a login node or a laptop there is neither, and the job would run elsewhere.
"""

import argparse
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import utils as megatron_utils
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer, vocab_size_with_padding
from packaging.version import Version

from megatron_nsp.mcore import refusals

CAPABILITY = (9, 0)
TE_VERSION = "2.14.0"
VOCAB_SIZE = 131072

_OPTIONAL_KERNELS = {
    "megatron.core.models.common.embeddings.rope_utils": (
        *("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"),
    ),
    "megatron.core.transformer.moe.moe_utils": (
        *("fused_permute", "fused_permute_with_probs", "fused_unpermute"),
        *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
    ),
}
"""Kernels of Transformer Engine that Megatron sets to None without it, by module."""


def assume_what_is_missing() -> list[str]:
    """Lets flags be checked as on a machine with a GPU and Transformer Engine.

    Returns:
        A line for each that is not here.
    """
    return [*_assume_gpu(), *_assume_te()]


def _assume_gpu() -> list[str]:
    if torch.cuda.device_count():
        return []
    major, minor = CAPABILITY
    properties = SimpleNamespace(major=major, minor=minor, total_memory=80 << 30)
    answers: dict[str, Callable[..., Any]] = {
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "current_device": lambda: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    return [f"no GPU here: one of compute capability {major}.{minor} is assumed"]


def _assume_te() -> list[str]:
    if HAVE_TE:
        return []

    def missing(*_: Any, **__: Any) -> None:
        raise AssertionError("a check runs no kernel")

    megatron_utils._te_version = Version(TE_VERSION)
    setattr(refusals, "HAVE_TE", True)  # noqa: B010 - a name that the module imported
    for module, names in _OPTIONAL_KERNELS.items():
        for name in names:
            if getattr(importlib.import_module(module), name) is None:
                setattr(importlib.import_module(module), name, missing)
    return [f"Transformer Engine is not installed here: {TE_VERSION} is assumed"]


def set_vocabulary(args: argparse.Namespace) -> list[str]:
    """Sets the padded size of the vocabulary, from the tokenizer if it can be opened here.

    Args:
        args: validated Megatron arguments.

    Returns:
        A line, if a size is assumed.
    """
    if args.padded_vocab_size is not None:
        return []
    try:
        build_tokenizer(args)
    except Exception as error:  # files and networks that a login node does not see
        whence = "--vocab-size" if args.vocab_size else "assumed"
        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size or VOCAB_SIZE, args, False)
        reason = " ".join(str(error).split())
        return [
            f"the tokenizer cannot be opened here ({type(error).__name__}: {reason}): a vocabulary "
            f"of {args.padded_vocab_size} is counted, {whence}"
        ]
    return []
