"""What a Megatron tree with the patches of `patches/` calls for its data.

Megatron's data loaders take a dataset and draw fixed-length samples from it. Planned documents have
their own order and their own shares of each rank, so the patched loader asks them for an iterator.
"""

import argparse
from collections.abc import Callable
from typing import Any

from megatron_nsp.mcore import parallel_state
from megatron_nsp.mcore.args import changed_flags
from megatron_nsp.mcore.data import NestedDataIterator


class PlannedDocuments:
    """Documents whose batches are planned: what a dataset provider returns for a patched loader.

    Args:
        open_iterator: makes the iterator over the micro-batches of this rank.
    """

    def __init__(self, open_iterator: Callable[[], NestedDataIterator]) -> None:
        """Opens nothing yet."""
        self._open_iterator = open_iterator

    def iterator(self) -> NestedDataIterator:
        """A new iterator, from the step at which the run starts or resumes."""
        return self._open_iterator()


def planned_iterator(dataset: Any, args: argparse.Namespace) -> NestedDataIterator | None:
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
