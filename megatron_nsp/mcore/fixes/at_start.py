"""Changes to Megatron 0.19.x at run time, each with its reason and a way to see when it can go."""

import functools
import importlib.util
import os
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import training

from megatron_nsp.mcore.fixes.torch_adam import make_checkpoints_loadable


def apply() -> None:
    """Applies all of them; a second call changes nothing."""
    _keep_compiled_dataset_index()
    make_checkpoints_loadable()
    _end_without_a_folder_to_save_in()
    _count_samples_by_groups()
    _skip_planned_steps()


def _keep_compiled_dataset_index() -> None:
    """Skips `make` where the helpers are compiled already.

    Megatron builds its dataset index helpers at start. A wheel has them compiled and carries no
    Makefile, so the build fails and ends the job. Can go when `compile_helpers` looks first.
    """
    folder = os.path.dirname(dataset_utils.__file__)
    is_compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if not is_compiled or os.path.isfile(os.path.join(folder, "Makefile")):
        return

    def keep(*_: Any, **__: Any) -> None:
        """Nothing to compile."""

    dataset_utils.compile_helpers = keep


def _end_without_a_folder_to_save_in() -> None:
    """Saves nothing where there is no `--save`.

    The rerun engine asks for a checkpoint before it ends a run on a NaN. Without `--save` that is a
    TypeError, the last thing a job says. Can go when Megatron's `train` looks at the flag first.
    """
    save = training.save_checkpoint_and_time
    if hasattr(save, "__wrapped__"):
        return

    @functools.wraps(save)
    def save_if_asked(*args: Any, **kwargs: Any) -> Any:
        if training.get_args().save is not None or kwargs.get("non_persistent_ckpt"):
            return save(*args, **kwargs)
        return None

    training.save_checkpoint_and_time = save_if_asked


class _CountedRanks:
    """Megatron's parallel state, but for the ranks by which its loop counts samples."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_data_parallel_world_size(self) -> int:
        """Data-parallel ranks as the arguments count them: a context-parallel group is one."""
        return int(training.get_args().data_parallel_size)


def _count_samples_by_groups() -> None:
    """Lets Megatron's loop count the samples of a step as its scheduler of batch sizes does.

    Ranks of a context-parallel group read the same samples. Nested sequence parallelism takes those
    groups apart, so the parallel state holds more data-parallel ranks than batches are counted by.
    Can go when `train` counts `get_current_running_global_batch_size()`.
    """
    training.mpu = _CountedRanks()


def _skip_planned_steps() -> None:
    """Takes the micro-batches of `--iterations-to-skip` from the iterator and leaves them.

    Megatron takes each for a dictionary that one tensor-parallel rank has and sends to the others.
    Ours are planned, and every rank has its own. Can go when `dummy_train_step` takes any batch.
    """

    def skip_step(data_iterator: Any) -> None:
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        while get_rerun_state_machine().should_run_forward_backward(data_iterator):
            for _ in range(get_num_microbatches()):
                for iterator in iterators:
                    next(iterator)

    training.dummy_train_step = skip_step
