"""Attention of queries whose keys come in parts: the outputs of the parts, merged by their LSE.

Shapes: S queries, h heads, D and V dims of keys and values.
"""

import torch
from torch import Tensor

from megatron_nsp.runtime.backends.blocks import Rows
from megatron_nsp.runtime.kernels.base import lse_dtype
from megatron_nsp.runtime.kernels.sink import log_add_exp


class Merged:
    """Output and LSE of queries, from the keys merged so far; zeros and -inf without any.

    Args:
        q_ShD: the queries; sums are in the precision of their LSE.
        value_dim: head dim of the output.
    """

    def __init__(self, q_ShD: Tensor, value_dim: int) -> None:
        self._dtype, dtype = q_ShD.dtype, lse_dtype(q_ShD.dtype)
        self._out_ShV = q_ShD.new_zeros(*q_ShD.shape[:2], value_dim, dtype=dtype)
        self._lse_hS = q_ShD.new_full((q_ShD.shape[1], q_ShD.shape[0]), float("-inf"), dtype=dtype)

    def merge(self, rows: Rows, out_ShV: Tensor, lse_hS: Tensor) -> None:
        """Adds what `rows` of the queries got from further keys."""
        old_lse = rows.take(self._lse_hS, dim=1)
        lse = log_add_exp(old_lse, lse_hS)
        kept, added = (torch.exp(x - lse).transpose(0, 1).unsqueeze(2) for x in (old_lse, lse_hS))
        rows.put(self._out_ShV, rows.take(self._out_ShV) * kept + out_ShV * added)
        rows.put(self._lse_hS, lse, dim=1)

    def result(self) -> tuple[Tensor, Tensor]:
        """`out_ShV` in the dtype of the queries, and `lse_hS`."""
        return self._out_ShV.to(self._dtype), self._lse_hS
