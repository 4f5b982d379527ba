"""What a run must have in common with its checkpoint to go on with the next document.

The position in the data is not stored: a resumed run draws the steps before it again. That is exact
as long as everything the draw depends on is the same, so this is kept in the checkpoint, beside
Megatron's own arguments, and compared on load.
"""

import argparse
import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch
from megatron.training import checkpointing

from megatron_nsp.mcore.job import Job
from megatron_nsp.mcore.layers import recomputed, recomputed_layers
from megatron_nsp.mcore.model import model_shape
from megatron_nsp.steps.draw import Blend

_FIELD = "nsp_draw"
_EVALUATED = "nsp_evaluated_steps"


class OtherDrawError(ValueError):
    """A run would draw other documents than the run that its checkpoint is from."""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def draw_settings(job: Job) -> dict[str, Any]:
    """Everything that decides which documents a step trains on, by the flag that sets it."""
    documents, first = job.documents.train, job.size.batches.train(0)
    if documents is None:  # with --skip-train nothing is drawn
        return {}
    lengths = _digest(documents.lengths.astype("<i8").tobytes())
    settings = {
        "--seed": job.args.seed,
        "--nsp-batch-tokens": first.tokens,
        "--step-batch-size-schedule": job.args.step_batch_size_schedule,
        "--nsp-max-length": job.size.max_length,
        "--data-path": f"{len(documents.lengths)} documents, lengths {lengths}",
        "weights of --data-path": _weights(documents.blend),
        "--nsp-token-budget": job.config.token_budget,
    }
    if job.config.token_budget is not None:  # what is carried over then depends on the plan
        settings |= _plan_settings(job)
    return settings


def _weights(blend: Blend | None) -> str | None:
    """Where each data set begins and how often it is drawn."""
    if blend is None:
        return None
    pairs = zip(blend.weights, blend.bounds, strict=False)
    return ", ".join(f"{weight:g} from document {first} on" for weight, first in pairs)


def _plan_settings(job: Job) -> dict[str, Any]:
    """Everything that a plan depends on beside the documents."""
    # Megatron pads the vocabulary later; the weights of a checkpoint fix it anyway.
    args = argparse.Namespace(**vars(job.args) | {"padded_vocab_size": 1})
    shape = model_shape(args, torch.empty(0, dtype=args.params_dtype).element_size())
    numbers = _digest(json.dumps(job.profile.to_dict(), sort_keys=True).encode())
    return {
        "--nsp-degrees": f"{job.tree.degrees} on {job.tree.num_ranks} ranks",
        "--nsp-policy": job.config.policy,
        "--nsp-backend": job.config.backend,
        "--no-nsp-overlap": not job.config.overlap,
        "micro-batches of a step": job.size.batches.train(0).num_micro_batches,
        "--nsp-profile": f"{job.profile.name}, numbers {numbers}",
        "--nsp-save-budget-gb": job.config.save_budget_gb,
        "recomputation": f"{recomputed(args)}, attention in {recomputed_layers(args)} layers",
    } | {f"a model whose {name} is": value for name, value in asdict(shape).items()}


def compare_on_load(args: argparse.Namespace, job: Job) -> None:
    """Makes checkpoints carry the settings, and loading compare them.

    Megatron saves its arguments and checks a few of them where it loads to resume (not with
    `--finetune`, which starts over). The wrapper raises OtherDrawError, on all ranks alike, naming
    the flag and both values.
    """
    setattr(args, _FIELD, draw_settings(job))
    check = checkpointing.check_checkpoint_args

    def check_checkpoint_args(checkpoint_args: argparse.Namespace, **kwargs: Any) -> None:
        check(checkpoint_args, **kwargs)
        compare(getattr(checkpoint_args, _FIELD, {}), draw_settings(job))
        count_evaluated(args, evaluated_steps(checkpoint_args))

    checkpointing.check_checkpoint_args = check_checkpoint_args


def count_evaluated(args: argparse.Namespace, num_steps: int) -> None:
    """Notes in the arguments, which checkpoints carry, how many validation steps are behind."""
    setattr(args, _EVALUATED, num_steps)


def evaluated_steps(args: argparse.Namespace) -> int:
    """Validation steps that are behind a run: its own, and those before it was resumed."""
    return int(getattr(args, _EVALUATED, 0))


def compare(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Compares the settings of a checkpoint with a run's.

    A checkpoint without any comes from elsewhere; a run without any draws nothing.

    Raises:
        OtherDrawError: one differs.
    """
    # What only one of them has follows from a flag that differs: that one is named.
    both, either = saved.keys() & own.keys(), saved.keys() ^ own.keys()
    for flag in [*sorted(both), *sorted(either)] if saved and own else ():
        if saved.get(flag) != own.get(flag):
            raise OtherDrawError(
                f"the checkpoint was made with {flag} {saved.get(flag)}, this run has "
                f"{own.get(flag)}: documents would repeat or be left out; --finetune starts over"
            )
