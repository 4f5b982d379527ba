"""What the users of Transformer Engine here share: its arguments of a call, and its module."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.base import VarlenCall
from megatron_nsp.runtime.kernels.needs import Needs

TE = Needs("cuda", "transformer_engine.pytorch", "transformer-engine")


def te_arguments(call: VarlenCall, device: torch.device) -> dict[str, Any]:
    """Bounds, mask and window under the names that all of TE has for them."""
    return {
        **call.keywords(device, "kv"),
        "attn_mask_type": _mask_type(call),
        "window_size": call.window,
    }


def without_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """Where the rows of each sample start: at its bounds, and TE wants to see the same tensors."""
    return {f"{name}_padded": arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}


def _mask_type(call: VarlenCall) -> str:
    """TE's name of the mask; where the queries are all of their keys both alignments agree."""
    if not call.mask.is_causal:
        return "padding"
    return "padding_causal" if call.samples.is_square else "padding_causal_bottom_right"


class ModuleShape(NamedTuple):
    """What one of TE's attention modules is made for: heads of the rank, their dims, the scale."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    softmax_scale: float

    @classmethod
    def of(cls, q_SHD: Tensor, v_CKV: Tensor, call: VarlenCall) -> "ModuleShape":
        """The shape for these queries and values."""
        (_, num_heads, head_dim), (_, num_kv_heads, value_dim) = q_SHD.shape, v_CKV.shape
        return cls(num_heads, num_kv_heads, head_dim, value_dim, call.mask.softmax_scale)

    def make(self, module_class: Any) -> Any:
        """A `DotProductAttention` of samples one after the other, without dropout."""
        return module_class(
            self.num_heads,
            (self.head_dim, self.value_dim),
            num_gqa_groups=self.num_kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            softmax_scale=self.softmax_scale,
        )
