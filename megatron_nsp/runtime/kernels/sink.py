"""Attention sinks around any kernel: one more score a head, with a value of zeros.

A sink adds exp(sink) to the sum of exponentials of every row of its head. From a kernel's out and
LSE: lse' = log(exp(lse) + exp(sink)), out' = out / (1 + exp(sink - lse)). The kernel's own backward
is right with out' and lse' in place of out and lse, and the gradient of the sink is
-sum over rows of exp(sink - lse') * rowsum(dout * out').
"""

import torch
from torch import Tensor

from megatron_nsp.runtime.kernels.lse import log_add_exp, lse_difference


def add_sink(out_SHV: Tensor, lse_HS: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE with the sink.

    Args:
        out_SHV: output without it.
        lse_HS: its LSE.
        sink_H: the sinks of these heads.

    Raises:
        ValueError: the kernel gave no LSE.
    """
    if lse_HS.shape[1] != out_SHV.shape[0]:
        raise ValueError(
            f"attention sinks need the LSE of all {out_SHV.shape[0]} rows, the kernel gives "
            f"{lse_HS.shape[1]}"
        )
    sink_H1 = sink_H.to(lse_HS.dtype).unsqueeze(1)
    together_HS = 1.0 + torch.exp(lse_difference(sink_H1, lse_HS))
    out_SHV = (out_SHV / together_HS.transpose(0, 1).unsqueeze(2)).to(out_SHV.dtype)
    return out_SHV, log_add_exp(sink_H1, lse_HS)


def sink_gradient(dout_SHV: Tensor, out_SHV: Tensor, lse_HS: Tensor, sink_H: Tensor) -> Tensor:
    """`[H]` gradient of the sinks, in the dtype of the LSE.

    Args:
        dout_SHV: gradient of the output.
        out_SHV: output with the sink.
        lse_HS: LSE with the sink.
        sink_H: the sinks.
    """
    share_HS = torch.exp(lse_difference(sink_H.to(lse_HS.dtype).unsqueeze(1), lse_HS))
    row_sum_SH = (dout_SHV.to(lse_HS.dtype) * out_SHV.to(lse_HS.dtype)).sum(dim=2)
    return -(share_HS * row_sum_SH.transpose(0, 1)).sum(dim=1)
