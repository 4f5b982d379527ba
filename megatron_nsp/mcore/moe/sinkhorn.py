"""Sinkhorn routing over the tokens of a whole domain.

Megatron scales the matrix of exp(logits), tokens by experts, in turn by rows and by columns until
every token and every expert weighs the same. Rows are a token's own; a column's sum is added up
over the domain in every round. All ranks see the same sums, so all stop after the same round.
"""

import torch
import torch.distributed as dist
from torch import Tensor

TOLERANCE = 1e-4
"""Megatron's: the mean change of an expert's factor in one round at which to stop."""

_EPSILON = 1e-8


def sinkhorn(
    logits_TE: Tensor, is_filler: Tensor, num_tokens: int, group: dist.ProcessGroup
) -> Tensor:
    """The scaled matrix, this rank's rows of it.

    Args:
        logits_TE: `[T, E]` float32.
        is_filler: `[T, 1]` rows that weigh nothing.
        num_tokens: tokens of the domain, at least 1.
        group: the ranks that hold them; all must call.
    """
    costs_TE = torch.exp(logits_TE).masked_fill(is_filler, 0.0)
    num_experts = costs_TE.shape[1]
    of_expert = costs_TE.new_ones(num_experts)
    while True:
        of_token = 1.0 / num_tokens / ((of_expert * costs_TE).sum(dim=1) + _EPSILON)
        sums_E = (of_token.unsqueeze(1) * costs_TE).sum(dim=0)
        dist.all_reduce(sums_E, group=group)
        before, of_expert = of_expert, 1.0 / num_experts / (sums_E + _EPSILON)
        if (before - of_expert).abs().mean() <= TOLERANCE:
            return of_expert * costs_TE * of_token.unsqueeze(1)
