"""Changes to Megatron 0.19.x at run time, each with its reason and a way to see when it can go."""

import importlib.util
import os
from typing import Any

from megatron.core.datasets import utils as dataset_utils

from megatron_nsp.mcore.torch_adam import make_checkpoints_loadable


def apply() -> None:
    """Applies all of them; a second call changes nothing."""
    _keep_compiled_dataset_index()
    make_checkpoints_loadable()


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
