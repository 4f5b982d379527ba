"""Tokens, labels and loss mask of every rank, written by hand."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.readers import read_tokens
from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree

TREE = SPTree(2, (1, 2))
PAIR, LEFT, RIGHT = TREE.node(2, 0), TREE.node(1, 0), TREE.node(1, 1)
TOKENS = [[30, 31, 32], [10, 11, 12, 13, 14], [40], [20, 21]]

Rows = tuple[list[int], list[int], list[int]]


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    """Four documents, side by side in one file."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/docs.bin", dtype=np.int32)
    for tokens in TOKENS:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{tmp_path}/docs.idx")
    return Documents([f"{tmp_path}/docs"])


def rows(plan: Plan, rank: int, of_samples: list[int], documents: Documents) -> Rows:
    layout = rank_layout(plan, rank, row_multiple=4)
    read = read_tokens(layout, np.array(of_samples), plan.lengths, documents)
    tokens, labels, loss_mask = (array.tolist() for array in read)
    return tokens, labels, loss_mask


def test_labels_are_the_next_tokens_of_the_own_document_on_every_rank(documents: Documents) -> None:
    # Documents 1 and 3 share the pair's stream of 7 tokens: 3 on rank 0, 4 on rank 1.
    plan = Plan.from_nodes(TREE, [5, 3, 2], [PAIR, RIGHT, PAIR])
    assert rows(plan, 0, [1, 0, 3], documents) == (
        [10, 11, 12, 0],
        [11, 12, 13, 0],  # 13 lies on rank 1
        [1, 1, 1, 0],
    )
    assert rows(plan, 1, [1, 0, 3], documents) == (
        [13, 14, 20, 21, 30, 31, 32, 0],
        [14, 0, 21, 0, 31, 32, 0, 0],
        [1, 0, 1, 0, 1, 1, 0, 0],
    )


def test_a_document_of_one_token_and_a_rank_without_any_have_no_target(
    documents: Documents,
) -> None:
    plan = Plan.from_nodes(TREE, [1], [LEFT])
    assert rows(plan, 0, [2], documents) == ([40, 0, 0, 0], [0] * 4, [0] * 4)
    assert rows(plan, 1, [2], documents) == ([0] * 4, [0] * 4, [0] * 4)


def test_a_slice_may_end_with_a_document_or_hold_only_its_last_token(documents: Documents) -> None:
    plan = Plan.from_nodes(TREE, [2, 2], [PAIR, PAIR])
    assert rows(plan, 0, [3, 3], documents) == ([20, 21, 0, 0], [21, 0, 0, 0], [1, 0, 0, 0])
    plan = Plan.from_nodes(TREE, [2], [PAIR])
    assert rows(plan, 0, [3], documents) == ([20, 0, 0, 0], [21, 0, 0, 0], [1, 0, 0, 0])
    assert rows(plan, 1, [3], documents) == ([21, 0, 0, 0], [0] * 4, [0] * 4)
