"""What multi-token prediction sees of a micro-batch: the tokens further on, by document.

At depth k a row learns the token 1 + k after its own from the token k after it. Megatron rolls
tokens, labels and loss mask by one row for each depth. In a buffer the next row may be of another
document, and what follows the last row of a slice lies on another rank. Readers know documents, so
they bring the tokens further on, and nothing is rolled or sent:

    document a b c d    depth      0          1          2
                        tokens     a b c d    b c d 0    c d 0 0
                        labels     b c d 0    c d 0 0    d 0 0 0
                        loss mask  1 1 1 0    1 1 0 0    1 0 0 0
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from megatron_nsp.mcore.readers import TokenRows, on_device
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.layout import RankLayout
from megatron_nsp.plan.plan import CARRIED, Plan


@dataclass(frozen=True, eq=False)
class FurtherTokens:
    """A micro-batch as one depth of multi-token prediction sees it, `[1, T]` each.

    Where a document ends before, there are zeros, as in a document that Megatron rolls.

    Attributes:
        tokens: int64 the token `depth` after each.
        positions: int64 its place in its document.
        labels: int64 the token after that one.
        loss_mask: float32, 1 where there is such a label.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor


def further_tokens(
    rows: TokenRows, layout: RankLayout, lengths: IntArray, filler_token: int = 0
) -> tuple[FurtherTokens, ...]:
    """What the depths see, depth 1 first; as many as tokens were read further on.

    Args:
        rows: what was read.
        layout: what the rank holds.
        lengths: `[n]` tokens of each sample of the step.
        filler_token: token of filler rows.
    """
    if not rows.further:
        return ()
    left = tokens_after(layout, lengths)
    depths = []
    for depth, (tokens, labels) in enumerate(pairwise((rows.labels, *rows.further)), 1):
        positions = np.where(left >= depth, layout.positions + depth, 0)
        loss_mask = (left > depth).astype(np.float32)
        tokens = with_filler_token(tokens, layout, filler_token)
        columns = tokens, on_device(positions), labels, on_device(loss_mask)
        depths.append(FurtherTokens(*(column.unsqueeze(0) for column in columns)))
    return tuple(depths)


def with_filler_token(tokens: Tensor, layout: RankLayout, filler_token: int) -> Tensor:
    """`[T]` the tokens, with this one in filler rows."""
    if not filler_token:  # what readers leave there
        return tokens
    tokens = tokens.clone()
    tokens[layout.num_tokens :] = filler_token
    return tokens


def tokens_after(layout: RankLayout, lengths: IntArray) -> IntArray:
    """`[T]` tokens of its document after each row's own; 0 in filler rows."""
    after = np.zeros(layout.buffer_tokens, dtype=np.int64)
    row = 0
    for sample, start, stop in layout.segments:
        after[row : row + stop - start] = lengths[sample] - 1 - np.arange(start, stop)
        row += stop - start
    return after


def num_targets(plan: Plan, depth: int) -> int:
    """Targets that a step has at a depth, on all ranks and in all micro-batches; 0 = its own."""
    lengths = plan.lengths[plan.micro_batch != CARRIED]
    return int(np.maximum(lengths - 1 - depth, 0).sum())
