"""Which queries attend to which keys in each round of a node with ring members, as index maths.

A member's stream holds, sample by sample, a head and a tail chunk (`split.py`). With a causal mask

    its own keys          every query, causal within the member's rows: they are in order
    an earlier member's   every query, all keys of the head chunks (the tail lies behind)
    a later member's      the queries of the tail chunks, all keys

so each round is one call of a variable-length kernel. Where keys are gathered first, the head and
the tail of a sample each see a run of keys that ends with their own last token: two calls with an
end-aligned causal mask, which is what sliding windows need. Members are sent what they see alone:
nothing of what lies behind, and of what lies before the end, if there is a window. With 2 members
(chunks 0 3 | 1 2), a window of one chunk and a sample of 12 tokens:

    member 0 has  0 1 2 | 9 10 11, sees and is sent    6 7 8 of member 1's 3 4 5 | 6 7 8
    member 1 has  3 4 5 | 6 7 8,   sees and is sent    0 1 2 of member 0's

Transformer Engine's own context parallelism wants every chunk filled up: a member has 2c rows of
each sample, of which its tokens are the first ones of either half.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_nsp.arrays import IntArray
from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.split import chunk_starts, chunk_tokens, head_and_tail_tokens


class BlockRows(NamedTuple):
    """Rows of one kernel call; entry j is one run of queries and the run of keys it attends to.

    Attributes:
        q_rows: `[sum(q_lengths)]` rows in the stream of the member whose queries they are.
        kv_rows: `[sum(kv_lengths)]` rows of the keys in what holds them.
        q_lengths: queries of each entry; none is 0.
        kv_lengths: keys of each entry; none is 0.
        is_causal: whether the last query of an entry sits at its last key; otherwise every query
            sees all keys.
    """

    q_rows: IntArray
    kv_rows: IntArray
    q_lengths: IntArray
    kv_lengths: IntArray
    is_causal: bool


def _runs(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenation of the ranges [start, start + length).

    Starts 5 0 9 and lengths 2 3 1 give 5 6 | 0 1 2 | 9: counted through that is 0 1 | 2 3 4 | 5, to
    which each range adds its start less the place where it begins, 5 | -2 | 4.
    """
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))


def _block(
    q_starts: IntArray,
    q_lengths: IntArray,
    kv_starts: IntArray,
    kv_lengths: IntArray,
    is_causal: bool,
) -> BlockRows:
    kept = (q_lengths > 0) & (kv_lengths > 0)
    q_lengths, kv_lengths = q_lengths[kept], kv_lengths[kept]
    return BlockRows(
        _runs(q_starts[kept], q_lengths),
        _runs(kv_starts[kept], kv_lengths),
        q_lengths,
        kv_lengths,
        is_causal,
    )


def ring_block(part: NodeSlice, q_member: int, kv_member: int, is_causal: bool) -> BlockRows:
    """What the queries of one member compute with the keys of another.

    Args:
        part: a slice of the node.
        q_member: the member whose queries they are.
        kv_member: the member whose keys they are; rows count from the start of its stream.
        is_causal: whether the mask is causal.
    """
    heads, tails = head_and_tail_tokens(part.lengths, part.split)
    both = heads + tails
    q_lengths, q_starts = both[q_member], np.cumsum(both[q_member]) - both[q_member]
    kv_lengths, kv_starts = both[kv_member], np.cumsum(both[kv_member]) - both[kv_member]
    if is_causal and kv_member < q_member:
        kv_lengths = heads[kv_member]
    elif is_causal and kv_member > q_member:
        q_starts, q_lengths = q_starts + heads[q_member], tails[q_member]
    return _block(q_starts, q_lengths, kv_starts, kv_lengths, is_causal and q_member == kv_member)


def gather_blocks(
    part: NodeSlice, held: Sequence[IntArray], is_causal: bool, window_left: int | None
) -> tuple[BlockRows, ...]:
    """What this rank's member computes once it holds the keys that it sees of all members.

    Key rows count in what is held of members 0..R-1, one after the other. No row of a call comes
    twice, so gradients of keys are added up in a fixed order, call by call.

    Args:
        part: this rank's slice of the node.
        held: the `seen_keys` of each member.
        is_causal: whether the mask is causal.
        window_left: most tokens before itself that a token sees; None = all.
    """
    heads, tails = head_and_tail_tokens(part.lengths, part.split)
    row_of = _held_rows(part, held)[gathered_rows(part)]
    first = part.cu_seqlens[:-1]
    both = (heads + tails)[part.member]
    q_starts = np.cumsum(both) - both
    if not is_causal:
        block = _block(q_starts, both, first, part.lengths, False)
        return (block._replace(kv_rows=row_of[block.kv_rows]),)
    chunks = chunk_starts(part.lengths, part.split)
    blocks = []
    for place, starts, lengths in (
        (part.member, q_starts, heads[part.member]),
        (2 * part.ring_degree - 1 - part.member, q_starts + heads[part.member], tails[part.member]),
    ):
        from_ = np.zeros_like(first)
        if window_left is not None:
            from_ = np.maximum(chunks[place] - window_left, 0)
        block = _block(starts, lengths, first + from_, chunks[place + 1] - from_, True)
        blocks.append(block._replace(kv_rows=row_of[block.kv_rows]))
    return tuple(blocks)


def seen_keys(
    part: NodeSlice, user: int, source: int, is_causal: bool, window_left: int | None
) -> IntArray:
    """Rows of one member's keys that the queries of another see, in order; all of its own.

    Args:
        part: a slice of the node.
        user: the member whose queries they are.
        source: the member whose keys they are; rows count from the start of its stream.
        is_causal: whether the mask is causal.
        window_left: most tokens before itself that a token sees; None = all.
    """
    heads, tails = head_and_tail_tokens(part.lengths, part.split)
    both = heads + tails
    row = np.cumsum(both[source]) - both[source]
    if user == source:
        return np.arange(int(both[source].sum()))
    if not is_causal:
        return _runs(row, np.where(both[user] > 0, both[source], 0))
    chunks, last = chunk_starts(part.lengths, part.split), 2 * part.ring_degree - 1
    starts, lengths = [], []
    for chunk, first_row in ((source, row), (last - source, row + heads[source])):
        from_ = chunks[chunk + 1]
        # What is seen of a chunk is a run up to its end, from where the first query that sees any
        # of it begins to see: all of it without a window, if there are such queries at all.
        for place in (user, last - user):
            if place > chunk:
                seen_from = 0 if window_left is None else chunks[place] - window_left
                has_queries = chunks[place + 1] > chunks[place]
                from_ = np.where(has_queries, np.minimum(from_, seen_from), from_)
        from_ = np.maximum(from_, chunks[chunk])
        starts.append(first_row + from_ - chunks[chunk])
        lengths.append(chunks[chunk + 1] - from_)
    return _runs(np.stack(starts, axis=1).reshape(-1), np.stack(lengths, axis=1).reshape(-1))


def _held_rows(part: NodeSlice, held: Sequence[IntArray]) -> IntArray:
    """Row in what this rank's member holds of each row of all streams in turn; -1 if it is not."""
    starts = np.cumsum(part.member_tokens) - part.member_tokens
    all_rows = np.concatenate([rows + start for rows, start in zip(held, starts, strict=True)])
    rows = np.full(sum(part.member_tokens), -1, dtype=np.int64)
    rows[all_rows] = np.arange(len(all_rows))
    return rows


def gathered_rows(part: NodeSlice) -> IntArray:
    """`[tokens of the node]` row of each token among the streams of members 0..R-1 in turn.

    Tokens count sample by sample, each in its own order.
    """
    chunks = chunk_starts(part.lengths, part.split) + part.cu_seqlens[:-1]
    rows = np.empty(int(part.cu_seqlens[-1]), dtype=np.int64)
    start = 0
    for member in range(part.ring_degree):
        tail = 2 * part.ring_degree - 1 - member
        ends = np.stack([chunks[[member, tail]], chunks[[member + 1, tail + 1]]])  # [2, 2, n]
        starts, stops = ends.transpose(0, 2, 1).reshape(2, -1)  # head and tail of each sample
        # With 2 members and samples of 8 and 4 tokens, the second one's being 8 to 11, member 0 has
        # 0 1 | 6 7 and 8 | 11 in rows 0 to 5, member 1 has 2 3 | 4 5 and 9 | 10 in rows 6 to 11.
        tokens = _runs(starts, stops - starts)
        rows[tokens] = np.arange(start, start + len(tokens))
        start += len(tokens)
    return rows


def filled_rows(part: NodeSlice) -> IntArray:
    """`[own tokens]` row of each of this member's tokens where all chunks are filled up."""
    heads, tails = head_and_tail_tokens(part.lengths, part.split)
    chunks = chunk_tokens(part.lengths, part.ring_degree)
    starts = 2 * (np.cumsum(chunks) - chunks)
    # Members' samples of 7 and 3 tokens in chunks of 2 and 1 rows: halves begin at 0 2 | 4 5, and
    # member 0, with 1 and 2 tokens of the one and 0 and 1 of the other, has rows 0 | 2 3 and 5.
    halves = np.stack([starts, starts + chunks], axis=1)
    return _runs(halves.reshape(-1), np.stack([heads, tails], axis=2)[part.member].reshape(-1))


def filled_bounds(part: NodeSlice) -> IntArray:
    """`[num_samples + 1]` where each sample starts in the node's filled-up samples, and the end."""
    chunks = chunk_tokens(part.lengths, part.ring_degree)
    return np.concatenate([[0], np.cumsum(2 * part.ring_degree * chunks)])
