"""The per-token loss: sums and counts, never local means.

Ranks hold different numbers of tokens, some of them none. Megatron adds up sums and counts over
ranks and micro-batches and divides once, so nothing here divides.
"""

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor

LossReport = tuple[Tensor, Tensor, dict[str, Tensor]]


def per_token_loss(losses: Tensor, loss_mask: Tensor, step_has_targets: bool) -> LossReport:
    """Megatron's loss contract under `--calculate-per-token-loss`.

    Args:
        losses: `[1, T]` loss of each token, float32.
        loss_mask: `[1, T]` 1 where a token has a target.
        step_has_targets: whether any rank has a target in this step. Without one the count that
            is reported is 1, so that the reported loss is 0 and not 0/0.

    Returns:
        The sum of the losses, the number of targets (an integer tensor), and the report.
    """
    # where, not a product: a loss that is not finite on a filler row must not reach the sum.
    total = torch.where(loss_mask > 0, losses, losses.new_zeros(())).sum()
    num_targets = loss_mask.sum().to(torch.int32)
    reported = num_targets if step_has_targets else torch.ones_like(num_targets)
    report = torch.stack([total.detach(), reported.to(total.dtype)])
    return total, num_targets, {"lm loss": report}


def checked_loss(losses: Tensor, loss_mask: Tensor, step_has_targets: bool) -> LossReport:
    """`per_token_loss`, whose sum Megatron's rerun engine sees before ranks add it up.

    Megatron leaves this check to the loss function. Gradients have one of their own, but not under
    Megatron-FSDP, where weights would go on as NaN without a word.

    Args:
        losses: as for `per_token_loss`.
        loss_mask: as for `per_token_loss`.
        step_has_targets: as for `per_token_loss`.
    """
    total, num_targets, report = per_token_loss(losses, loss_mask, step_has_targets)
    for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        get_rerun_state_machine().validate_result(
            result=total.detach(),
            rejection_func=is_bad,
            message=f"found {name} in the loss of a rank's tokens",
            tolerance=0.0,
            fatal=True,
        )
    return total, num_targets, report
