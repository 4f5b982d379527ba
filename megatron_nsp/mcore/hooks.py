"""What a Megatron tree with the patches of `patches/` calls for its data.

Megatron's data loaders take a dataset and draw fixed-length samples from it. Planned documents have
their own order and their own shares of each rank, so the patched loader asks them for an iterator.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import tee
from typing import Any

from megatron_nsp.mcore import parallel_state
from megatron_nsp.mcore.args import changed_flags
from megatron_nsp.mcore.data import MicroBatch


class PlannedDocuments:
    """Documents whose batches are planned: what a dataset provider returns for a patched loader.

    Where a pipeline rank runs several chunks of a model, each draws every micro-batch. They are
    planned and read once, for the first chunk that asks, and held until the last one has them.

    Args:
        open_iterator: makes the iterator over the micro-batches of this rank.
        num_chunks: chunks of the model on this rank.
    """

    def __init__(self, open_iterator: Callable[[], Iterator[MicroBatch]], num_chunks: int) -> None:
        """Opens nothing yet."""
        self._open_iterator, self._num_chunks = open_iterator, num_chunks
        self._waiting: list[Iterator[MicroBatch]] = []

    def iterator(self) -> Iterator[MicroBatch]:
        """The iterator of one chunk, from the step at which the run starts or resumes."""
        if not self._waiting:
            self._waiting.extend(tee(self._open_iterator(), self._num_chunks))
        return self._waiting.pop()


def planned_iterator(dataset: Any, args: argparse.Namespace) -> Iterator[MicroBatch] | None:
    """The iterator that takes the place of a sampler and a DataLoader, for planned documents.

    Args:
        dataset: what the dataset provider returned.
        args: validated Megatron arguments.

    Returns:
        None for any other dataset: Megatron then goes on as without the patch.

    Raises:
        ValueError: `--nsp-*` flags are set, but the script never turned nested sequence
            parallelism on; without this the flags would be ignored in silence.
    """
    if isinstance(dataset, PlannedDocuments):
        return dataset.iterator()
    flags = changed_flags(args)
    if flags and parallel_state.configured_tree() is None:
        raise ValueError(
            f"{', '.join(flags)} would have no effect: this script does not turn nested sequence "
            "parallelism on (megatron_nsp.mcore.pretrain.Trainer.start)"
        )
    return None
