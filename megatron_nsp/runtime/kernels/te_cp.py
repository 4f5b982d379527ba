"""Transformer Engine's own context parallelism: attention of a whole node, communication and all.

TE takes its group from the module, so there is one module for every group, shape and method. Its
group is set once, when the module is made: several nodes are live at once, and TE's forward reads
the group from the module.
"""

from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention

from megatron_nsp.runtime.kernels.base import AttentionMask, SampleBounds, pad_head_dim
from megatron_nsp.runtime.kernels.padded import round_up, window
from megatron_nsp.runtime.kernels.te_attention import attention_module


class TeContextParallel:
    """TE's ring ('p2p') and its Ulysses ('a2a') on CUDA tensors of 16-bit floats."""

    def __init__(self) -> None:
        """Modules are made as nodes come; without parameters they hold nothing but settings."""
        self.modules: dict[tuple, DotProductAttention] = {}

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """TE's second stream, on which it communicates or runs every other step of its ring."""
        return torch.cuda.Stream()

    def attend(
        self,
        q_FHD: Tensor,
        k_FKD: Tensor,
        v_FKV: Tensor,
        samples: SampleBounds,
        mask: AttentionMask,
        group: dist.ProcessGroup,
        method: str,
    ) -> Tensor:
        """See `NativeAttention.attend`."""
        (_, num_heads, head_dim), (_, num_kv_heads, value_dim) = q_FHD.shape, v_FKV.shape
        dims = round_up(head_dim), round_up(value_dim)
        shape = num_heads, num_kv_heads, *dims, mask.softmax_scale
        if (group, method, *shape) not in self.modules:
            module = attention_module(*shape)
            ranks = dist.get_process_group_ranks(group)
            module.set_context_parallel_group(group, ranks, self._stream, method)
            self.modules[group, method, *shape] = module
        # Bounds and longest length are those of the whole samples, whatever this rank holds. The
        # rows that fill up a sample count as its last tokens, which no other token sees: told that
        # they are none, TE would not take flash-attn 2.
        cu_seqlens, longest = samples.cu_seqlens(q_FHD.device), samples.max_length
        out = self.modules[group, method, *shape](
            pad_head_dim(q_FHD, dims[0]),
            pad_head_dim(k_FKD, dims[0]),
            pad_head_dim(v_FKV, dims[1]),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attn_mask_type="padding_causal",
            window_size=window(mask),
            pad_between_seqs=False,
        )
        attended: Tensor = out.view(-1, num_heads, dims[1])[..., :value_dim]
        return attended
