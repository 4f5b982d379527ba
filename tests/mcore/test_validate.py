"""The checks of a job's documents, at their very limits."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_nsp.config import NSPConfig
from megatron_nsp.mcore.validate import check_lengths
from megatron_nsp.plan.tree import SPTree

TREE = SPTree(4, (1, 2, 4))


def check(lengths: list[int], max_length: int = 1000, **settings: object) -> None:
    documents = SimpleNamespace(lengths=np.array(lengths), flag="--data-path")
    config = NSPConfig(**settings)  # type: ignore[arg-type]
    check_lengths(config, documents, max_length, TREE, is_chunked=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [97, 98, 99, 100])
def test_the_longest_sample_may_fill_the_budget_at_the_largest_degree(longest: int) -> None:
    check([5, longest, 0, 80], token_budget=25)  # ceil(97 / 4) = 25 tokens on a rank


def test_one_token_over_the_budget_is_refused() -> None:
    message = (
        "^--nsp-token-budget 25 is too small: the longest sample of --data-path, 101 tokens, "
        "puts 26 on a rank at the largest degree 4$"
    )
    with pytest.raises(ValueError, match=message):
        check([5, 101, 80], token_budget=25)


def test_over_long_documents_count_neither_for_the_budget_nor_as_trainable() -> None:
    check([100, 101], max_length=100, token_budget=25)
    with pytest.raises(ValueError, match="no document to train on: 2 documents, none with 1 to 99"):
        check([100, 0], max_length=99)


def test_over_long_documents_are_refused_where_they_are_an_error() -> None:
    check([7, 100], max_length=100, over_long="error")
    with pytest.raises(ValueError, match=r"document 1 of .* has 101 tokens, over .* 100; 2 of 3"):
        check([7, 101, 102], max_length=100, over_long="error")
