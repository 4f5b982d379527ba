"""Transformer Engine's own context parallelism: attention of a whole node, communication and all.

TE takes its group from the module, so there is one module for every group, shape and method. Its
group is set once, when the module is made: several nodes are live at once, and TE's forward reads
the group from the module.
"""

from functools import cached_property
from typing import Any, override

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.runtime.kernels.base import NativeAttention, VarlenCall, pad_head_dim
from megatron_nsp.runtime.kernels.padded import round_up
from megatron_nsp.runtime.kernels.te_attention import (
    TE,
    ModuleShape,
    te_arguments,
    without_padding,
)


class TeContextParallel(NativeAttention):
    """TE's ring ('p2p') and its Ulysses ('a2a') on CUDA tensors of 16-bit floats."""

    needs = TE

    def __init__(self) -> None:
        """Loads the package.

        Modules are made as nodes come; without parameters they hold nothing but settings.
        """
        from transformer_engine.pytorch import DotProductAttention

        self._module_class: Any = DotProductAttention
        self.modules: dict[tuple[dist.ProcessGroup, str, ModuleShape], Any] = {}

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """TE's second stream, on which it communicates or runs every other step of its ring."""
        return torch.cuda.Stream()

    @override
    def attend(
        self,
        q_FHD: Tensor,
        k_FKD: Tensor,
        v_FKV: Tensor,
        call: VarlenCall,
        group: dist.ProcessGroup,
        method: str,
    ) -> Tensor:
        dims = round_up(q_FHD.shape[2]), round_up(v_FKV.shape[2])
        q, k = pad_head_dim(q_FHD, dims[0]), pad_head_dim(k_FKD, dims[0])
        v = pad_head_dim(v_FKV, dims[1])
        shape = ModuleShape.of(q, v, call)
        if (group, method, shape) not in self.modules:
            module = shape.make(self._module_class)
            ranks = dist.get_process_group_ranks(group)
            module.set_context_parallel_group(group, ranks, self._stream, method)
            self.modules[group, method, shape] = module
        # Bounds and longest length are those of the whole samples, whatever this rank holds. The
        # rows that fill up a sample count as its last tokens, which no other token sees: told that
        # they are none, TE would not take flash-attn 2.
        arguments = te_arguments(call, q.device)
        out = self.modules[group, method, shape](
            q, k, v, pad_between_seqs=False, **arguments, **without_padding(arguments)
        )
        attended: Tensor = out.view(-1, shape.num_heads, dims[1])[..., : v_FKV.shape[2]]
        return attended
