"""How the samples of a node are dealt to its ring members: in chunks, a head and a tail to each.

A sample is cut into 2R chunks and member r holds chunks r and 2R-1-r, its head and its tail: with a
causal mask all members then have the same work. The chunks of a member, sample by sample, are its
stream.

    R = 2, samples of 9 and 4 tokens     chunks 0..1 2..3 4..5 6..8     0 1 2 3
        member 0                         0 1 6 7 8                      0 3
        member 1                         2 3 4 5                        1 2

Where the chunks of a sample must be equally long, it is filled up to 2R chunks of c = ceil(L / 2R)
rows, and chunk i is what there is of the tokens [c*i, c*(i+1)).

    R = 2, samples of 9 and 4 tokens     chunks 0..2 3..5 6..8 none     0 1 2 3
        member 0                         0 1 2                          0 3
        member 1                         3 4 5 6 7 8                    1 2
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_nsp.plan.arrays import IntArray


@dataclass(frozen=True, eq=False)
class Dealing:
    """Samples in chunks.

    Attributes:
        lengths: `[n]` tokens of each sample.
        starts: `[2R + 1, n]` where each chunk of each sample starts, and the end.
    """

    lengths: IntArray
    starts: IntArray

    @property
    def num_members(self) -> int:
        """Ring members (R)."""
        return len(self.starts) // 2

    @cached_property
    def heads(self) -> IntArray:
        """`[R, n]` tokens of each sample's head chunk at each member."""
        return np.diff(self.starts, axis=0)[: self.num_members]

    @cached_property
    def tails(self) -> IntArray:
        """`[R, n]` tokens of each sample's tail chunk at each member."""
        return np.diff(self.starts, axis=0)[self.num_members :][::-1]

    @cached_property
    def tokens(self) -> IntArray:
        """`[R, n]` tokens of each sample at each member."""
        return self.heads + self.tails

    @cached_property
    def first_rows(self) -> IntArray:
        """`[R, n]` row of each sample's first token in each member's stream."""
        return np.cumsum(self.tokens, axis=1) - self.tokens

    @cached_property
    def member_tokens(self) -> tuple[int, ...]:
        """Tokens in the stream of each member."""
        return tuple(self.tokens.sum(axis=1).tolist())


def even_chunks(lengths: IntArray, num_members: int) -> Dealing:
    """Chunks whose lengths differ by at most one token in a sample."""
    places = np.arange(2 * num_members + 1, dtype=np.int64)[:, None]
    return Dealing(lengths, lengths * places // (2 * num_members))


def equal_chunks(lengths: IntArray, num_members: int) -> Dealing:
    """Chunks that are equally long once a sample is filled up."""
    places = np.arange(2 * num_members + 1, dtype=np.int64)[:, None]
    return Dealing(lengths, np.minimum(places * chunk_rows(lengths, num_members), lengths))


def chunk_rows(lengths: IntArray, num_members: int) -> IntArray:
    """`[n]` rows of every chunk of a sample that is filled up to equal ones (c)."""
    rows: IntArray = -(-lengths // (2 * num_members))
    return rows
