"""Which queries attend to which keys in each round of a node with ring members, as index maths.

A member's stream holds, sample by sample, a head and a tail chunk (`chunks.py`). With a causal mask

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

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.chunks import Dealing, chunk_rows


class KeyMask(NamedTuple):
    """Which keys of its sample a query sees.

    Attributes:
        is_causal: none behind itself; otherwise all.
        window_left: most tokens before itself that it sees; None = all.
    """

    is_causal: bool = True
    window_left: int | None = None


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


def ring_block(dealing: Dealing, q_member: int, kv_member: int, is_causal: bool) -> BlockRows:
    """What the queries of one member compute with the keys of another.

    Args:
        dealing: the node's samples.
        q_member: the member whose queries they are.
        kv_member: the member whose keys they are; rows count from the start of its stream.
        is_causal: whether the mask is causal.
    """
    heads, tokens, rows = dealing.heads, dealing.tokens, dealing.first_rows
    q_lengths, q_starts = tokens[q_member], rows[q_member]
    kv_lengths, kv_starts = tokens[kv_member], rows[kv_member]
    if is_causal and kv_member < q_member:
        kv_lengths = heads[kv_member]
    elif is_causal and kv_member > q_member:
        q_starts, q_lengths = q_starts + heads[q_member], dealing.tails[q_member]
    return _block(q_starts, q_lengths, kv_starts, kv_lengths, is_causal and q_member == kv_member)


def gather_blocks(
    dealing: Dealing, member: int, held: Sequence[IntArray], mask: KeyMask
) -> tuple[BlockRows, ...]:
    """What a member computes once it holds the keys that it sees of all members.

    Key rows count in what is held of members 0..R-1, one after the other. No row of a call comes
    twice, so gradients of keys are added up in a fixed order, call by call.

    Args:
        dealing: the node's samples.
        member: the member.
        held: the `seen_keys` of each member.
        mask: the layer's mask.
    """
    row_of = _held_rows(dealing, held)[gathered_rows(dealing)]
    first = np.cumsum(dealing.lengths) - dealing.lengths
    heads, q_starts = dealing.heads[member], dealing.first_rows[member]
    if not mask.is_causal:
        block = _block(q_starts, dealing.tokens[member], first, dealing.lengths, False)
        return (block._replace(kv_rows=row_of[block.kv_rows]),)
    chunks = dealing.starts
    blocks = []
    for place, starts, lengths in (
        (member, q_starts, heads),
        (2 * dealing.num_members - 1 - member, q_starts + heads, dealing.tails[member]),
    ):
        from_ = np.zeros_like(first)
        if mask.window_left is not None:
            from_ = np.maximum(chunks[place] - mask.window_left, 0)
        block = _block(starts, lengths, first + from_, chunks[place + 1] - from_, True)
        blocks.append(block._replace(kv_rows=row_of[block.kv_rows]))
    return tuple(blocks)


def seen_keys(dealing: Dealing, user: int, source: int, mask: KeyMask) -> IntArray:
    """Rows of one member's keys that the queries of another see, in order; all of its own.

    Args:
        dealing: the node's samples.
        user: the member whose queries they are.
        source: the member whose keys they are; rows count from the start of its stream.
        mask: the layer's mask.
    """
    tokens, row = dealing.tokens, dealing.first_rows[source]
    if user == source:
        return np.arange(dealing.member_tokens[source])
    if not mask.is_causal:
        return _runs(row, np.where(tokens[user] > 0, tokens[source], 0))
    chunks, last = dealing.starts, 2 * dealing.num_members - 1
    starts, lengths = [], []
    for chunk, first_row in ((source, row), (last - source, row + dealing.heads[source])):
        from_ = chunks[chunk + 1]
        # What is seen of a chunk is a run up to its end, from where the first query that sees any
        # of it begins to see: all of it without a window, if there are such queries at all.
        for place in (user, last - user):
            if place > chunk:
                seen_from = 0 if mask.window_left is None else chunks[place] - mask.window_left
                has_queries = chunks[place + 1] > chunks[place]
                from_ = np.where(has_queries, np.minimum(from_, seen_from), from_)
        from_ = np.maximum(from_, chunks[chunk])
        starts.append(first_row + from_ - chunks[chunk])
        lengths.append(chunks[chunk + 1] - from_)
    return _runs(np.stack(starts, axis=1).reshape(-1), np.stack(lengths, axis=1).reshape(-1))


def _held_rows(dealing: Dealing, held: Sequence[IntArray]) -> IntArray:
    """Row in what a member holds of each row of all streams in turn; -1 if it is not there."""
    starts = np.cumsum(dealing.member_tokens) - dealing.member_tokens
    all_rows = np.concatenate([rows + start for rows, start in zip(held, starts, strict=True)])
    rows = np.full(sum(dealing.member_tokens), -1, dtype=np.int64)
    rows[all_rows] = np.arange(len(all_rows))
    return rows


def gathered_rows(dealing: Dealing) -> IntArray:
    """`[tokens of the node]` row of each token among the streams of members 0..R-1 in turn.

    Tokens count sample by sample, each in its own order.
    """
    chunks = dealing.starts + np.cumsum(dealing.lengths) - dealing.lengths
    rows = np.empty(int(dealing.lengths.sum()), dtype=np.int64)
    start = 0
    for member in range(dealing.num_members):
        tail = 2 * dealing.num_members - 1 - member
        ends = np.stack([chunks[[member, tail]], chunks[[member + 1, tail + 1]]])  # [2, 2, n]
        starts, stops = ends.transpose(0, 2, 1).reshape(2, -1)  # head and tail of each sample
        # With 2 members and samples of 8 and 4 tokens, the second one's being 8 to 11, member 0 has
        # 0 1 | 6 7 and 8 | 11 in rows 0 to 5, member 1 has 2 3 | 4 5 and 9 | 10 in rows 6 to 11.
        tokens = _runs(starts, stops - starts)
        rows[tokens] = np.arange(start, start + len(tokens))
        start += len(tokens)
    return rows


def filled_rows(dealing: Dealing, member: int) -> IntArray:
    """`[own tokens]` row of each of a member's tokens where all chunks are filled up."""
    chunks = chunk_rows(dealing.lengths, dealing.num_members)
    starts = 2 * (np.cumsum(chunks) - chunks)
    # Members' samples of 7 and 3 tokens in chunks of 2 and 1 rows: halves begin at 0 2 | 4 5, and
    # member 0, with 1 and 2 tokens of the one and 0 and 1 of the other, has rows 0 | 2 3 and 5.
    halves = np.stack([starts, starts + chunks], axis=1)
    tokens = np.stack([dealing.heads[member], dealing.tails[member]], axis=1)
    return _runs(halves.reshape(-1), tokens.reshape(-1))


def filled_bounds(dealing: Dealing) -> IntArray:
    """`[num_samples + 1]` where each sample starts in the node's filled-up samples, and the end."""
    rows = 2 * dealing.num_members * chunk_rows(dealing.lengths, dealing.num_members)
    return np.concatenate([[0], np.cumsum(rows)])
