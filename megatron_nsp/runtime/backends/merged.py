"""Attention of queries whose keys come in parts: the outputs of the parts, merged by their LSE.

A part counts by exp(its LSE - the largest so far); what all count together divides last.

    LSE of two parts    5000      4993
    weights             1         9.1e-4        together 1.00091
    output              (out_0 + 9.1e-4 * out_1) / 1.00091

Weights exp(LSE of the part - LSE of all) would not add up to 1: near 5,000 the LSE of all is
rounded to 2e-4, and they with it. Shapes: S queries, h heads, D and V dims of keys and values.
"""

import torch
from torch import Tensor

from megatron_nsp.runtime.backends.blocks import Rows
from megatron_nsp.runtime.kernels.base import lse_dtype
from megatron_nsp.runtime.kernels.lse import lse_difference


class Merged:
    """Output and LSE of queries, from the keys merged so far; zeros and -inf without any.

    Args:
        q_ShD: the queries; sums are in the precision of their LSE.
        value_dim: head dim of the output.
    """

    def __init__(self, q_ShD: Tensor, value_dim: int) -> None:
        self._dtype, dtype = q_ShD.dtype, lse_dtype(q_ShD.dtype)
        rows = q_ShD.shape[1], q_ShD.shape[0]
        self._sum_ShV = q_ShD.new_zeros(*q_ShD.shape[:2], value_dim, dtype=dtype)
        self._largest_hS = q_ShD.new_full(rows, float("-inf"), dtype=dtype)
        self._weight_hS = q_ShD.new_ones(rows, dtype=dtype)

    def merge(self, rows: Rows, out_ShV: Tensor, lse_hS: Tensor) -> None:
        """Adds what `rows` of the queries got from further keys; an LSE of -inf is none."""
        before = rows.take(self._largest_hS, dim=1)
        largest = torch.maximum(before, lse_hS)
        kept, added = (torch.exp(lse_difference(x, largest)) for x in (before, lse_hS))
        kept_sum = rows.take(self._sum_ShV) * _by_row(kept)
        rows.put(self._sum_ShV, kept_sum + out_ShV * _by_row(added))
        rows.put(self._weight_hS, rows.take(self._weight_hS, dim=1) * kept + added, dim=1)
        rows.put(self._largest_hS, largest, dim=1)

    def result(self) -> tuple[Tensor, Tensor]:
        """`out_ShV` in the dtype of the queries, and `lse_hS`, rounded once for all parts."""
        out = torch.empty_like(self._sum_ShV, dtype=self._dtype)
        torch.div(self._sum_ShV, _by_row(self._weight_hS), out=out)
        return out, self._largest_hS + torch.log(self._weight_hS)


def _by_row(weight_hS: Tensor) -> Tensor:
    return weight_hS.transpose(0, 1).unsqueeze(2)  # [S, h, 1]
