"""Pure tests of the batch order. Cases A3 and C3, the parts that need no process."""

import numpy as np
import pytest

from megatron_nsp.steps.draw import document_order
from megatron_nsp.steps.sampler import BatchSampler, always


def test_every_document_once_an_epoch_in_the_order_of_the_seed() -> None:
    lengths = np.arange(1, 101)
    sampler = BatchSampler(lengths, always(300), max_length=100, seed=5)
    drawn: list[int] = []
    while len(drawn) < 100:
        batch = sampler.draw()
        assert batch.num_tokens >= 300 and batch.num_tokens - batch.lengths[-1] < 300
        drawn += batch.documents.tolist()
    assert drawn[:100] == document_order(100, 5, 0).tolist()
    assert sorted(drawn[:100]) == list(range(100))
    assert document_order(100, 5, 1).tolist() != document_order(100, 5, 0).tolist()
    assert document_order(100, 6, 0).tolist() != document_order(100, 5, 0).tolist()


def test_a3_over_long_documents_are_passed_over_and_counted() -> None:
    sampler = BatchSampler(np.array([10000, 512, 512]), always(1024), max_length=8192, seed=0)
    batches = [sampler.draw() for _ in range(4)]
    assert all(sorted(batch.documents.tolist()) == [1, 2] for batch in batches)
    counted = [(batch.over_long.tolist(), batch.over_long_tokens) for batch in batches]
    assert ([0], 10000) in counted and all(entry in (([0], 10000), ([], 0)) for entry in counted)
    assert sum(len(documents) for documents, _ in counted) >= 3
    longest = BatchSampler(np.array([8192]), always(1), max_length=8192, seed=0).draw()
    assert longest.lengths.tolist() == [8192]


def test_c3_empty_documents_are_dropped_with_a_count() -> None:
    sampler = BatchSampler(np.array([0, 5, 0, 6]), always(11), max_length=8, seed=0)
    batches = [sampler.draw() for _ in range(10)]
    assert all(sorted(batch.lengths.tolist()) == [5, 6] for batch in batches)
    assert sum(batch.num_empty for batch in batches) in range(18, 21)


def test_carried_documents_lead_the_next_batch_and_nothing_is_lost() -> None:
    sampler = BatchSampler(np.full(20, 10), always(50), max_length=10, seed=1)
    first = sampler.draw()
    sampler.carry(first.documents[-2:])
    second = sampler.draw()
    assert second.documents[:2].tolist() == first.documents[-2:].tolist()
    assert (second.num_carried, second.num_tokens) == (2, 50)
    assert sampler.draw().num_carried == 0


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "none of the 0 documents can be trained on: .* 1 to 8 tokens, the longest is 0"),
        ([0, 0], "none of the 2 documents can be trained on: .* 1 to 8 tokens, the longest is 0"),
        ([9, 10], "none of the 2 documents can be trained on: .* 1 to 8 tokens, the longest is 10"),
    ],
)
def test_nothing_to_train_on_is_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSampler(np.array(lengths, dtype=np.int64), always(10), max_length=8, seed=0)
