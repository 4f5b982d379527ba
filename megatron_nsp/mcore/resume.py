"""What a run must have in common with its checkpoint to go on with the next document.

The position in the data is not stored: a resumed run draws the steps before it again. That is exact
as long as everything the draw depends on is the same, so this is kept in the checkpoint, beside
Megatron's own arguments, and compared on load.
"""

import argparse
import hashlib
from typing import Any

from megatron.training import checkpointing

from megatron_nsp.mcore.job import Job

_FIELD = "nsp_draw"


def draw_settings(job: Job) -> dict[str, Any]:
    """Everything that decides which documents a step trains on, by the flag that sets it."""
    lengths = hashlib.sha256(job.documents.lengths.astype("<i8").tobytes()).hexdigest()[:16]
    settings = {
        "--seed": job.args.seed,
        "--nsp-batch-tokens": job.config.batch_tokens,
        "--nsp-max-length": job.max_length,
        "--data-path": f"{len(job.documents.lengths)} documents, lengths {lengths}",
        "--nsp-token-budget": job.config.token_budget,
    }
    if job.config.token_budget is not None:  # what is carried over then depends on the plan
        settings |= {
            "--nsp-degrees": f"{job.tree.degrees} on {job.tree.num_ranks} ranks",
            "--nsp-policy": job.config.policy,
            "--global-batch-size": job.args.global_batch_size,
            "--nsp-profile": job.profile.name,
            "--nsp-save-budget-gb": job.config.save_budget_gb,
        }
    return settings


def check_on_load(args: argparse.Namespace, job: Job) -> None:
    """Makes checkpoints carry the settings, and loading compare them.

    Megatron saves its arguments and checks a few of them where it loads to resume (not with
    `--finetune`, which starts over). The wrapper raises ValueError, on all ranks alike, naming the
    flag and both values.
    """
    setattr(args, _FIELD, draw_settings(job))
    check = checkpointing.check_checkpoint_args

    def check_checkpoint_args(checkpoint_args: argparse.Namespace, **kwargs: Any) -> None:
        check(checkpoint_args, **kwargs)
        compare(getattr(checkpoint_args, _FIELD, {}), draw_settings(job))

    checkpointing.check_checkpoint_args = check_checkpoint_args


def compare(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Compares the settings of a checkpoint with a run's; one without any comes from elsewhere.

    Raises:
        ValueError: one differs.
    """
    for flag in sorted(saved.keys() | own.keys()) if saved else ():
        if saved.get(flag) != own.get(flag):
            raise ValueError(
                f"the checkpoint was made with {flag} {saved.get(flag)}, this run has "
                f"{own.get(flag)}: documents would repeat or be left out; --finetune starts over"
            )
