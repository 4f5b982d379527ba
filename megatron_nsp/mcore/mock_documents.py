"""Documents for `--mock-data`: made up, with lengths as long-tailed as those of real corpora.

Lengths come from the table `paper-mix` (`steps/data/lengths`: lognormal below 8192 tokens with a
median of 1024, Pareto above), capped at the longest sample. A token is a hash of the seed, its
document and its place: every rank can make any of them by itself.
"""

import copy
from collections.abc import Sequence

import numpy as np

from megatron_nsp.mcore.data_paths import Share
from megatron_nsp.mcore.documents import cut
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.steps.draw import Blend
from megatron_nsp.steps.lengths import load_table

NUM_DOCUMENTS = 100_000
"""As many as Megatron's own mock data set has."""

_TABLE = "paper-mix"


class MockDocuments:
    """Made-up documents.

    Args:
        seed: of lengths and tokens.
        max_length: longest document, in tokens.
    """

    flag: str = "--mock-data"
    names: Sequence[str] = ("mock data",)
    blend: Blend | None = None

    def __init__(self, seed: int, max_length: int) -> None:
        """Draws the lengths."""
        drawn = load_table(_TABLE).draw(np.random.default_rng(seed))
        parts: list[IntArray] = []
        while sum(map(len, parts)) < NUM_DOCUMENTS:
            parts.append(next(drawn))
        self.lengths: IntArray = np.minimum(np.concatenate(parts)[:NUM_DOCUMENTS], max_length)
        self._seed, self._first = seed, 0
        self._vocabulary: int | None = None

    def part(self, share: Share) -> "MockDocuments":
        """The documents of a share, numbered from 0; their tokens stay as they are."""
        part = copy.copy(self)
        first, end = cut(len(self.lengths), share)
        part.lengths, part._first = self.lengths[first:end], self._first + first
        return part

    def with_vocabulary(self, vocabulary: int) -> "MockDocuments":
        """The same, with tokens from a vocabulary."""
        documents = copy.copy(self)
        documents._vocabulary = vocabulary
        return documents

    def name_of(self, document: int) -> str:
        """What a document is called in errors."""
        return f"document {self._first + document} of {self.flag}"

    def read(self, document: int, start: int, stop: int) -> IntArray:
        """Tokens [start, stop) of a document."""
        assert self._vocabulary is not None, "read before the vocabulary is known"
        places = np.arange(start, stop, dtype=np.uint64)
        stream = _mix(np.array([self._seed, self._first + document], dtype=np.uint64))
        tokens = _mix(_mix(stream[:1] + stream[1:]) + places) % np.uint64(self._vocabulary)
        return tokens.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), element by element."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
