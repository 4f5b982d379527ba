"""Differences and sums of LSEs, right at any size and for rows that see no key (LSE -inf).

A float32 near 5,000 is rounded to 2e-4. So weights are taken from the difference of two LSEs, which
is exact where they are close, and never from the distance to a sum that has just been rounded.
"""

import torch
from torch import Tensor


def lse_difference(a: Tensor, b: Tensor) -> Tensor:
    """A - b, and 0 where they are equal: also minus infinity both."""
    return (a - b).masked_fill_(a == b, 0.0)


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)).

    torch.logaddexp gives other last bits to an element that a vector instruction reaches than to
    one of the remainder, so the bits of a row would depend on its place; exp and log do not.
    """
    smaller = torch.exp(-lse_difference(a, b).abs())
    return torch.maximum(a, b) + torch.log(1.0 + smaller)
