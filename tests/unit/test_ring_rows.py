"""Chunks of ring members and the queries and keys of each round, without a process."""

import random

import numpy as np
import pytest

from megatron_nsp.plan.backends import NATIVE
from megatron_nsp.plan.layout import NodeSlice, rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.ring_rows import (
    BlockRows,
    KeyMask,
    filled_bounds,
    filled_rows,
    gather_blocks,
    gathered_rows,
    ring_block,
    seen_keys,
)
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.testing.random_plans import random_lengths

ROOT = Node(0, 0)


def slices(lengths: list[int], degree: int, split: Split) -> list[NodeSlice]:
    """Every rank's slice of one node."""
    tree = SPTree(degree, (1, degree))
    plan = Plan.from_nodes(tree, lengths, [ROOT] * len(lengths), splits={(0, ROOT): split})
    return [rank_layout(plan, rank).slices[0] for rank in range(degree)]


def tokens_of(part: NodeSlice) -> list[tuple[int, int]]:
    """(sample, position) of each row of a rank."""
    return [(s, p) for s, start, stop in part.segments() for p in range(start, stop)]


def random_nodes(count: int) -> list[list[NodeSlice]]:
    rng = random.Random(3)
    nodes = []
    for _ in range(count):
        ring_degree, ulysses_degree = rng.choice(((2, 1), (2, 2), (3, 2), (4, 1), (4, 2), (8, 1)))
        lengths = random_lengths(rng, 6, 40)
        nodes.append(slices(lengths, ring_degree * ulysses_degree, Split(ring_degree)))
    return nodes


def random_native_nodes(count: int) -> list[list[NodeSlice]]:
    rng = random.Random(3)
    nodes = []
    for _ in range(count):
        degree = rng.choice((2, 3, 4, 8))
        nodes.append(slices(random_lengths(rng, 6, 40), degree, Split(degree, rng.choice(NATIVE))))
    return nodes


def test_the_documented_example() -> None:
    parts = slices([9, 4], 2, Split(2))
    assert tokens_of(parts[0]) == [(0, p) for p in (0, 1, 6, 7, 8)] + [(1, 0), (1, 3)]
    assert tokens_of(parts[1]) == [(0, p) for p in (2, 3, 4, 5)] + [(1, 1), (1, 2)]


def test_the_documented_example_of_filled_up_samples() -> None:
    parts = slices([9, 4], 2, Split(2, "te-a2a"))
    assert tokens_of(parts[0]) == [(0, p) for p in (0, 1, 2)] + [(1, 0), (1, 3)]
    assert tokens_of(parts[1]) == [(0, p) for p in range(3, 9)] + [(1, 1), (1, 2)]
    assert filled_rows(parts[0].dealing, 0).tolist() == [0, 1, 2, 6, 7]
    assert filled_rows(parts[1].dealing, 1).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert filled_bounds(parts[0].dealing).tolist() == [0, 12, 16]


def test_filled_up_rows_are_what_transformer_engine_deals() -> None:
    """Its rule: rank r has chunks r and 2R-1-r of each sample, all of one length."""
    for parts in random_native_nodes(200):
        degree, bounds = parts[0].degree, filled_bounds(parts[0].dealing)
        filled = np.diff(bounds)
        assert (filled % (2 * degree) == 0).all() and (filled - parts[0].lengths >= 0).all()
        assert (filled - parts[0].lengths < 2 * degree).all()
        for part in parts:
            dealt = [
                (sample, i * length // (2 * degree) + token)
                for sample, length in zip(part.samples.tolist(), filled.tolist(), strict=True)
                for i in (part.rank_in_node, 2 * degree - 1 - part.rank_in_node)
                for token in range(length // (2 * degree))
            ]
            rows = filled_rows(part.dealing, part.member)
            assert [dealt[row] for row in rows] == tokens_of(part)
            lengths = dict(zip(part.samples.tolist(), part.lengths.tolist(), strict=True))
            there = [row for row, (s, p) in enumerate(dealt) if p < lengths[s]]
            assert rows.tolist() == there


@pytest.mark.parametrize(
    ("degree", "split", "message"),
    [
        (4, Split(2, "te-p2p"), "te-p2p divides a node among all of its ranks.*cannot have 2"),
        (1, Split(1, "te-a2a"), "te-a2a divides a node among all of its ranks, 2 at least"),
        (4, Split(3, "te-a2a"), "a node of degree 4 cannot have 3 ring members"),
        (4, Split(4, "te"), "get around by ring or gather or te-p2p or te-a2a, not te"),
    ],
)
def test_other_divisions_are_refused(degree: int, split: Split, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split.validate(degree)


def test_te_a2a_needs_heads_that_divide() -> None:
    for heads in ((8, 4), (4, 4)):
        Split(4, "te-a2a").backend.check_heads(4, *heads)
    for heads in ((8, 2), (6, 4), (8, 6)):
        with pytest.raises(ValueError, match=f"{heads[0]} query and {heads[1]} key/value heads"):
            Split(4, "te-a2a").backend.check_heads(4, *heads)
        Split(4, "te-p2p").backend.check_heads(4, *heads)


def test_every_token_is_on_one_rank() -> None:
    for parts in random_nodes(100) + random_native_nodes(100):
        held = [token for part in parts for token in tokens_of(part)]
        lengths = dict(zip(parts[0].samples.tolist(), parts[0].lengths.tolist(), strict=True))
        assert sorted(held) == [(s, p) for s in sorted(lengths) for p in range(lengths[s])]
        assert [len(tokens_of(part)) for part in parts] == list(parts[0].rank_tokens)


def test_long_samples_are_balanced() -> None:
    tokens = np.array(Split(4).deal(np.array([1000, 37, 64])).member_tokens)
    assert tokens.max() - tokens.min() <= 3


def member_rows(parts: list[NodeSlice], member: int) -> list[tuple[int, int]]:
    """(sample, position) of each row of a member's stream."""
    return [token for part in parts if part.member == member for token in tokens_of(part)]


def pairs(
    block: BlockRows,
    queries: list[tuple[int, int]],
    keys: list[tuple[int, int]],
    window: int | None,
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The pairs of query and key that a kernel call computes with end-aligned masks."""
    seen, q_at, k_at = [], 0, 0
    for q_length, k_length in zip(block.q_lengths, block.kv_lengths, strict=True):
        for i in range(q_length):
            last = k_length - q_length + i if block.is_causal else k_length - 1
            first = 0 if window is None or not block.is_causal else max(0, last - window)
            for j in range(first, last + 1):
                seen.append((queries[block.q_rows[q_at + i]], keys[block.kv_rows[k_at + j]]))
        q_at, k_at = q_at + q_length, k_at + k_length
    return seen


def expected_pairs(
    queries: list[tuple[int, int]], lengths: dict[int, int], is_causal: bool, window: int | None
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    found = []
    for sample, position in queries:
        last = position if is_causal else lengths[sample] - 1
        first = 0 if window is None else max(0, position - window)
        found += [((sample, position), (sample, p)) for p in range(first, last + 1)]
    return sorted(found)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_rounds_of_a_ring_cover_every_pair_once(is_causal: bool) -> None:
    for parts in random_nodes(60):
        degree = parts[0].num_members
        lengths = dict(zip(parts[0].samples.tolist(), parts[0].lengths.tolist(), strict=True))
        for member in range(degree):
            queries = member_rows(parts, member)
            seen = []
            for source in range(degree):
                block = ring_block(parts[0].dealing, member, source, is_causal)
                seen += pairs(block, queries, member_rows(parts, source), None)
            assert sorted(seen) == expected_pairs(queries, lengths, is_causal, None)


@pytest.mark.parametrize(
    ("is_causal", "window"), [(True, None), (False, None), (True, 0), (True, 5)]
)
def test_gathered_keys_cover_every_pair_once(is_causal: bool, window: int | None) -> None:
    mask = KeyMask(is_causal, window)
    for parts in random_nodes(60):
        lengths = dict(zip(parts[0].samples.tolist(), parts[0].lengths.tolist(), strict=True))
        for part in parts:
            keys, others, held = [], set(), []
            for source in range(part.num_members):
                rows = seen_keys(part.dealing, part.member, source, mask)
                stream = member_rows(parts, source)
                held.append(rows)
                keys += [stream[row] for row in rows]
                if source == part.member:
                    assert rows.tolist() == list(range(len(stream)))
                else:
                    others |= {stream[row] for row in rows}
            queries, seen = member_rows(parts, part.member), []
            for block in gather_blocks(part.dealing, part.member, held, mask):
                assert len(set(block.kv_rows.tolist())) == len(block.kv_rows)
                seen += pairs(block, queries, keys, window)
            assert sorted(seen) == expected_pairs(queries, lengths, is_causal, window)
            assert others == {key for _, key in seen} - set(queries)  # nothing else is sent


def test_gathered_rows_lead_from_samples_to_members() -> None:
    for parts in random_nodes(20):
        keys = [k for member in range(parts[0].num_members) for k in member_rows(parts, member)]
        in_order = [
            (sample, position)
            for sample, length in zip(parts[0].samples, parts[0].lengths, strict=True)
            for position in range(length)
        ]
        assert [keys[row] for row in gathered_rows(parts[0].dealing)] == in_order


def test_the_rest_of_a_slice_is_the_end_of_its_rows() -> None:
    for parts in random_nodes(60):
        for part in parts:
            for count in range(len(part.samples) + 1):
                rest = part.without_first(count)
                gone = set(part.samples[:count].tolist())
                assert tokens_of(rest) == [t for t in tokens_of(part) if t[0] not in gone]
                assert rest.buffer_start + rest.num_tokens == part.buffer_start + part.num_tokens


def test_plans_with_splits_are_read_back_and_differ_by_digest() -> None:
    tree = SPTree(4, (1, 4))
    plan = Plan.from_nodes(tree, [9, 4], [ROOT, ROOT], splits={(0, ROOT): Split(2, "gather")})
    assert Plan.from_json(plan.to_json()) == plan
    whole = Plan.from_nodes(tree, [9, 4], [ROOT, ROOT], splits={(0, ROOT): Split()})
    assert whole == Plan.from_nodes(tree, [9, 4], [ROOT, ROOT]) != plan
    assert plan.token_load().tolist() == [p.num_tokens for p in slices([9, 4], 4, Split(2))]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({(0, ROOT): Split(3)}, "a node of degree 4 cannot have 3 ring members"),
        ({(0, ROOT): Split(2, "star")}, "or te-a2a, not star"),
        ({(0, Node(1, 2)): Split(1, "gather")}, "without samples is split: depth 1, index 2"),
    ],
)
def test_impossible_splits_are_refused(splits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_nodes(SPTree(4, (1, 4)), [9], [ROOT], splits=splits)
