"""Pure tests of the static input layout and the maps to the plan layout. Case C5, on the host."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_nsp.plan.layout import RankLayout, Segment, rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.static_layout import ReshardMap, static_layout
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.testing.random_plans import random_step

TREE = SPTree(4, (1, 2, 4))
DRAWN = Plan.from_nodes(TREE, [5, 2, 4], [TREE.node(4, 0), TREE.node(1, 3), TREE.node(2, 0)])
NUM_RANKS = 8


def static_by_hand(plan: Plan, rank: int, degree: int, micro_batch: int) -> list[tuple[int, int]]:
    """(sample, position) of each token, by dealing samples out one after the other."""
    num_groups = plan.tree.num_ranks // degree
    streams: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
    turn = 0
    for sample, length in enumerate(plan.lengths.tolist()):
        if plan.micro_batch[sample] == micro_batch:
            streams[turn % num_groups] += [(sample, position) for position in range(length)]
            turn += 1
    stream, place = streams[rank // degree], rank % degree
    return stream[len(stream) * place // degree : len(stream) * (place + 1) // degree]


def tokens_of(layout: RankLayout) -> list[tuple[int, int]]:
    """(sample, position) of each buffer row, filler rows left out."""
    return [(sample, p) for sample, start, stop in layout.segments for p in range(start, stop)]


def cases() -> list[tuple[Plan, int, int]]:
    """Plan, static degree and row multiple: 200 random steps of eight ranks."""
    rng = random.Random(5)
    return [
        (random_step(rng, NUM_RANKS), rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 8)))
        for _ in range(200)
    ]


def test_the_drawn_example_of_the_module() -> None:
    static = [static_layout(DRAWN, rank, 2).segments for rank in range(4)]
    assert static == [
        (Segment(0, 0, 4),),
        (Segment(0, 4, 5), Segment(2, 0, 4)),
        (Segment(1, 0, 1),),
        (Segment(1, 1, 2),),
    ]
    maps = [ReshardMap.build(DRAWN, 0, rank, 2) for rank in range(4)]
    assert maps[1].static.rows.tolist() == [1, 2, 3, 4, 0]
    assert maps[1].static.counts == (2, 2, 0, 1)
    assert maps[3].plan.rows.tolist() == [0, 1, 2, 3]
    assert maps[3].plan.counts == (1, 1, 1, 1)


def test_the_static_layout_deals_whole_samples_and_cuts_streams_evenly() -> None:
    for plan, degree, _ in cases():
        for micro_batch in range(plan.num_micro_batches):
            for rank in range(NUM_RANKS):
                layout = static_layout(plan, rank, degree, micro_batch)
                expected = static_by_hand(plan, rank, degree, micro_batch)
                assert tokens_of(layout) == expected
                assert layout.buffer_tokens == layout.num_tokens == len(expected)


def test_the_nodes_of_a_plan_do_not_change_the_static_layout() -> None:
    moved = Plan.from_nodes(TREE, DRAWN.lengths, [TREE.node(1, 0)] * 3)
    for rank in range(4):
        assert static_layout(moved, rank, 2).segments == static_layout(DRAWN, rank, 2).segments


def exchange(
    senders: list[RankLayout], maps: list[ReshardMap], to_plan: bool
) -> list[dict[int, tuple[int, int]]]:
    """Plays the all-to-all on the host; by rank: which token arrives in which row."""
    sides = [(m.static, m.plan) if to_plan else (m.plan, m.static) for m in maps]
    sent: list[list[list[tuple[int, int]]]] = []
    for layout, (sender, _) in zip(senders, sides, strict=True):
        tokens = tokens_of(layout)
        in_order = iter([tokens[row] for row in sender.rows])
        sent.append([[next(in_order) for _ in range(count)] for count in sender.counts])
        assert next(in_order, None) is None
    arrived = []
    for rank, (_, receiver) in enumerate(sides):
        parts = [sent[source][rank] for source in range(len(maps))]
        assert tuple(map(len, parts)) == receiver.counts  # what i sends to j is what j expects
        tokens = [token for part in parts for token in part]
        rows = receiver.rows.tolist()
        assert len(set(rows)) == len(rows)
        arrived.append(dict(zip(rows, tokens, strict=True)))
    return arrived


def assert_every_token_finds_its_row(
    static: list[RankLayout], planned: list[RankLayout], maps: list[ReshardMap]
) -> None:
    for to_plan, senders, receivers in ((True, static, planned), (False, planned, static)):
        for layout, rows in zip(receivers, exchange(senders, maps, to_plan), strict=True):
            assert rows == dict(enumerate(tokens_of(layout)))


def test_c5_what_one_rank_sends_is_what_the_other_expects() -> None:
    some_rank_is_empty = {"static": False, "plan": False}
    for plan, degree, row_multiple in cases():
        for micro_batch in range(plan.num_micro_batches):
            ranks = range(NUM_RANKS)
            static = [static_layout(plan, rank, degree, micro_batch) for rank in ranks]
            planned = [rank_layout(plan, rank, micro_batch, row_multiple) for rank in ranks]
            maps = [
                ReshardMap.build(plan, micro_batch, rank, degree, row_multiple) for rank in ranks
            ]
            assert_every_token_finds_its_row(static, planned, maps)
            assert [m.plan.buffer_tokens for m in maps] == [p.buffer_tokens for p in planned]
            some_rank_is_empty["static"] |= any(layout.num_tokens == 0 for layout in static)
            some_rank_is_empty["plan"] |= any(layout.num_tokens == 0 for layout in planned)
    assert all(some_rank_is_empty.values())


@dataclass
class Dealt:
    """A layout made of any runs; what the maps may look at."""

    rank: int
    segments: tuple[Segment, ...]
    buffer_tokens: int
    token_numbers = RankLayout.token_numbers


def test_maps_follow_the_runs_whatever_their_order() -> None:
    """Ranks with several runs of one sample, the later one first, as ring backends deal them."""
    rng = random.Random(1)
    for plan, degree, _ in cases()[:50]:
        static = [static_layout(plan, rank, degree) for rank in range(NUM_RANKS)]
        runs = [
            Segment(sample, middle, stop) if half else Segment(sample, start, middle)
            for layout in static
            for sample, start, stop in layout.segments
            for middle in [rng.randint(start, stop)]
            for half in range(2)
        ]
        runs = [run for run in runs if run.stop > run.start]
        rng.shuffle(runs)
        planned = []
        for rank in range(NUM_RANKS):
            held = tuple(runs[rank::NUM_RANKS])
            rows = sum(run.stop - run.start for run in held) + 3
            planned.append(Dealt(rank, held, rows))
        maps = [
            ReshardMap.between(static[rank], planned[rank], static, planned, plan)  # type: ignore[arg-type]
            for rank in range(NUM_RANKS)
        ]
        assert_every_token_finds_its_row(static, planned, maps)  # type: ignore[arg-type]


def test_a_static_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="degree 3 does not divide the 4 ranks"):
        ReshardMap.build(DRAWN, 0, 0, 3)


def test_a_filler_micro_batch_moves_nothing() -> None:
    plan = Plan.from_nodes(TREE, [5], [TREE.node(1, 0)], [0], num_micro_batches=2)
    for rank in range(4):
        idle = ReshardMap.build(plan, 1, rank, 2, row_multiple=4)
        assert idle.static.counts == idle.plan.counts == (0,) * 4
        assert (idle.static.buffer_tokens, idle.plan.buffer_tokens) == (0, 4)
        assert np.array_equal(idle.plan.rows, [])
