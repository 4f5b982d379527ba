"""Pure tests of the draw: shares, epochs, and a run that goes on in the middle."""

import random

import numpy as np
import pytest

from megatron_nsp.steps.draw import Blend, BlendDraw, DataSetDraw, document_order
from megatron_nsp.steps.sampler import BatchSampler, always


def random_blend(seed: int) -> tuple[Blend, np.ndarray]:
    """One to eight data sets of 1 to 900 documents, a tenth of which cannot be trained on."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 900) for _ in range(rng.randint(1, 8))]
    weights = [rng.choice((0.0, rng.random(), rng.randint(1, 90))) for _ in sizes]
    weights[rng.randrange(len(sizes))] = 1.0
    bounds = np.cumsum([0, *sizes])
    is_usable = np.array([rng.random() < 0.9 for _ in range(bounds[-1])])
    is_usable[bounds[:-1]] = True
    return Blend(bounds.tolist(), weights), is_usable


@pytest.mark.parametrize("seed", range(20))
def test_each_data_set_has_its_share_and_every_document_comes_once_an_epoch(seed: int) -> None:
    blend, is_usable = random_blend(seed)
    draw = BlendDraw(blend, is_usable, seed)
    drawn: list[list[int]] = [[] for _ in blend.weights]
    num_usable = np.zeros(len(blend.weights), dtype=int)
    shares = np.array(blend.weights) / sum(blend.weights)
    while num_usable.sum() < 2000:
        document = draw.next()
        place = int(np.searchsorted(blend.bounds, document, side="right")) - 1
        drawn[place].append(document)
        num_usable[place] += is_usable[document]
        size = blend.bounds[place + 1] - blend.bounds[place]
        assert draw.epoch == (len(drawn[place]) - 1) // size
        # never more than a document or two from its share, so after 2000 within 1% of the draw
        assert (abs(num_usable - shares * num_usable.sum()) < 3).all()
    assert (abs(num_usable / 2000 - shares) < 0.01).all()
    for place, documents in enumerate(drawn):
        first, end = blend.bounds[place : place + 2]
        for start in range(0, len(documents), end - first):
            epoch = documents[start : start + end - first]
            assert len(set(epoch)) == len(epoch)
            if len(epoch) == end - first:
                assert sorted(epoch) == list(range(first, end))
    assert all(documents or not weight for documents, weight in zip(drawn, shares, strict=True))
    assert not any(documents for documents, weight in zip(drawn, shares, strict=True) if not weight)


def test_shares_of_a_quarter_and_three_document_by_document() -> None:
    """Of n drawn, A lacks n / 4 and B 3 n / 4 minus what they have; A comes first where both are
    right, and before the first document B lacks more."""
    draw = BlendDraw(Blend([0, 5, 9], [1, 3]), np.full(9, True), seed=1)
    assert "".join("AB"[draw.next() >= 5] for _ in range(16)) == "BABB" + "ABBB" * 3


def test_a_document_that_is_passed_over_does_not_cost_its_data_set_the_turn() -> None:
    is_usable = np.array([True, False, False, False] + [True] * 4)
    draw = BlendDraw(Blend([0, 4, 8], [1, 1]), is_usable, seed=3)
    drawn = [draw.next() for _ in range(200)]
    usable = [document for document in drawn if is_usable[document]]
    assert [document >= 4 for document in usable] == [False, True] * (len(usable) // 2)
    assert len(usable) % 2 == 0 and {1, 2, 3} <= set(drawn)


def test_data_sets_of_one_size_have_orders_of_their_own() -> None:
    draw = BlendDraw(Blend([0, 50, 100], [1, 1]), np.full(100, True), seed=0)
    drawn = [draw.next() for _ in range(100)]
    first = [document for document in drawn if document < 50]
    second = [document - 50 for document in drawn if document >= 50]
    assert sorted(first) == sorted(second) == list(range(50)) and first != second


def test_without_weights_the_order_is_one_permutation_of_seed_and_epoch() -> None:
    draw = DataSetDraw(0, 100, seed=5)
    for epoch in range(3):
        expected = np.random.default_rng([5, epoch]).permutation(100).tolist()
        assert [draw.next() for _ in range(100)] == expected
        assert draw.epoch == epoch
        assert document_order(100, 5, epoch).tolist() == expected


def sampler(blend: Blend) -> BatchSampler:
    """Lengths of 0 to 119, of which the longest do not fit."""
    lengths = np.random.default_rng(0).integers(0, 120, blend.bounds[-1])
    return BatchSampler(lengths, always(700), 100, seed=4, blend=blend)


@pytest.mark.parametrize("steps", [0, 1, 7, 40])
def test_a_resumed_draw_goes_on_as_the_whole_one(steps: int) -> None:
    """Samples are carried, some by the last step before the run ends."""
    blend = Blend([0, 30, 45, 200], [0.5, 0.2, 0.3])
    whole, first, second = (sampler(blend) for _ in range(3))
    batches = []
    for _ in range(50):
        batches.append(whole.draw())
        whole.carry(batches[-1].documents[-2:])
    for batch in batches[:steps]:
        assert first.draw().documents.tolist() == batch.documents.tolist()
        first.carry(batch.documents[-2:])
    for _ in range(steps):  # as a resumed run does: it draws the steps before again
        second.carry(second.draw().documents[-2:])
    for batch in batches[steps:]:
        drawn = second.draw()
        assert drawn.documents.tolist() == batch.documents.tolist()
        assert (drawn.epoch, drawn.num_empty) == (batch.epoch, batch.num_empty)
        assert drawn.over_long.tolist() == batch.over_long.tolist()
        second.carry(drawn.documents[-2:])


def test_a_pass_draws_every_document_that_can_be_trained_on_once() -> None:
    lengths = np.random.default_rng(1).integers(0, 120, 300)
    once = BatchSampler(lengths, always(700), 100, seed=4, once=True)
    endless = BatchSampler(lengths, always(700), 100, seed=4)
    drawn: list[int] = []
    while not once.is_over:
        batch, expected = once.draw(), endless.draw()
        new = batch.documents[batch.num_carried :]
        assert new.tolist() == expected.documents[expected.num_carried :][: len(new)].tolist()
        drawn += new.tolist()
        once.carry(batch.documents[-1:] if batch.num_tokens > 300 else batch.documents[:0])
        endless.carry(expected.documents[-1:])
    assert sorted(drawn) == np.flatnonzero((lengths > 0) & (lengths <= 100)).tolist()
    assert not endless.is_over


def test_m7_an_epoch_of_four_steps_and_documents_counted_from_the_start() -> None:
    even = BatchSampler(np.full(64, 64), always(1024), 64, seed=1)
    counts = [(batch.epoch, batch.num_drawn) for batch in (even.draw() for _ in range(9))]
    assert counts == [(step // 4, 16 * step + 16) for step in range(9)]
