"""A pretraining script of someone who runs a patched Megatron tree, as patches/README.md describes.

Nothing here adds flags, wraps Megatron's functions or opens an iterator: the tree does. What rank 0
found is written to the file named in FOUND.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

enable_cpu_mode()

import megatron.core  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import pretrain  # noqa: E402
from megatron.training.argument_utils import pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

from megatron_nsp.mcore import parallel_state  # noqa: E402
from megatron_nsp.mcore.loss import per_token_loss  # noqa: E402
from megatron_nsp.mcore.model import model_config  # noqa: E402
from megatron_nsp.mcore.packed_seq_params import NestedSeqParams  # noqa: E402
from megatron_nsp.mcore.pretrain import Trainer  # noqa: E402

found: dict[str, Any] = {}


def forward_step(trainer: Trainer, data_iterator: Any, model: Any) -> tuple[Any, Any]:
    found["iterator"] = type(data_iterator.iterable).__name__
    found["num_groups"] = parallel_state.get_nested_groups().num_groups
    batch = next(data_iterator)
    losses = model(
        batch.tokens,
        batch.positions.unsqueeze(0),
        None,
        labels=batch.labels,
        packed_seq_params=NestedSeqParams.of(
            batch.nested, trainer.runtime, batch.positions, batch.further
        ),
    )
    return losses, partial(
        per_token_loss, loss_mask=batch.loss_mask, step_has_targets=batch.step_has_targets
    )


def main() -> None:
    args = parse_and_validate_args()
    found["batch_tokens"] = args.nsp_batch_tokens
    trainer = Trainer.start(args)
    config = pretrain_cfg_container_from_args(args, model_config(args))
    found["core"] = megatron.core.__file__
    found["initialize_from"] = mpu.initialize_model_parallel.__module__
    pretrain(config, trainer.datasets, ModelType.encoder_or_decoder, partial(forward_step, trainer))
    trainer.close()
    mpu.destroy_model_parallel()
    found["groups_after_destroy"] = parallel_state.nested_groups_are_initialized()
    if dist.get_rank() == 0:
        Path(os.environ["FOUND"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
