"""Runs pretrain_nsp's main and writes down what each step did, from outside.

    torchrun --nproc-per-node N tests/mcore/probe.py OUT [--probe-float64] [--probe-fail R:S] ARGS...

Each rank writes OUT/rank<R>.pt: a list of steps with the reported loss, every parameter's gradient
as the optimizer sees it (experts under their global number), each token's loss by document and
position, and the all-to-alls of the nested groups. Nothing in the package knows of this.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

OUT = Path(sys.argv.pop(1))


def take_flag(name: str) -> bool:
    """Removes a flag of the probe's own from the command line."""
    if name in sys.argv:
        sys.argv.remove(name)
        return True
    return False


FLOAT64 = take_flag("--probe-float64")
FAIL = next((arg.partition("=")[2] for arg in sys.argv if arg.startswith("--probe-fail=")), None)
sys.argv = [arg for arg in sys.argv if not arg.startswith("--probe-fail=")]

from megatron_nsp.mcore.cpu import enable_cpu_mode  # noqa: E402

enable_cpu_mode(float64=FLOAT64)

import torch  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.training import training  # noqa: E402

from megatron_nsp.mcore import pretrain  # noqa: E402
from megatron_nsp.testing.logging_group import CollectiveLog, LoggingGroup  # noqa: E402

RANK = int(os.environ["RANK"])
STEPS: list[dict[str, Any]] = []
TOKENS: list[tuple[int, int, float]] = []
LOG = CollectiveLog()


def global_name(name: str) -> str:
    """The parameter's name with a local expert's number turned into the global one."""
    match = re.search(r"local_experts\.(\d+)\.", name)
    if not match:
        return name
    num_local = training.get_args().num_experts // mpu.get_expert_model_parallel_world_size()
    expert = mpu.get_expert_model_parallel_rank() * num_local + int(match.group(1))
    return name.replace(match.group(0), f"local_experts.{expert}.")


def watch_optimizer() -> None:
    """Saves every gradient just before the optimizer's step."""
    setup = training.setup_model_and_optimizer

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        models, optimizer = result[0], result[1]
        step = optimizer.step

        def logged_step(*a: Any, **k: Any) -> Any:
            grads = {
                global_name(name.removeprefix("module.").removeprefix("module.")): (
                    parameter.main_grad.detach().clone()
                )
                for model in models
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            records = list(LOG.records)
            STEPS.append({"grads": grads, "tokens": list(TOKENS), "records": records})
            TOKENS.clear()
            LOG.clear()
            return step(*a, **k)

        optimizer.step = logged_step
        return result

    training.setup_model_and_optimizer = watched


def watch_loss() -> None:
    """Saves the loss Megatron reports, unrounded."""
    log = training.training_log

    def watched(loss_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        STEPS[-1]["loss"] = float(loss_dict["lm loss"])
        return log(loss_dict, *args, **kwargs)

    training.training_log = watched


def watch_tokens() -> None:
    """Saves each token's loss by document and position."""
    forward = pretrain.Trainer.forward_step

    def watched(self: pretrain.Trainer, data_iterator: Any, model: Any) -> Any:
        batches = []

        class Tap:
            def __next__(self) -> Any:
                batches.append(next(data_iterator))
                return batches[-1]

        losses, loss = forward(self, Tap(), model)
        (batch,) = batches
        assert self.step is not None
        row = 0
        for sample, start, stop in batch.nested.layout.segments:
            document = int(self.step.batch.documents[sample])
            for position in range(start, stop):
                if batch.loss_mask[0, row]:
                    TOKENS.append((document, position, float(losses[0, row])))
                row += 1
        return losses, loss

    pretrain.Trainer.forward_step = watched


def watch_groups() -> None:
    """Puts a logging group around each nested group."""
    provide = pretrain.Trainer.__call__

    def watched(self: pretrain.Trainer, *args: Any, **kwargs: Any) -> Any:
        result = provide(self, *args, **kwargs)
        assert self.runtime is not None
        group_of = self.runtime.groups._group_of
        plain = dict(group_of)
        for node, group in plain.items():
            group_of[node] = LoggingGroup(group, LOG)
        close = self.close

        def restore_and_close() -> None:
            group_of.update(plain)
            close()

        self.close = restore_and_close  # type: ignore[method-assign]
        return result

    pretrain.Trainer.__call__ = watched


def fail_on_purpose(rank: int, step: int) -> None:
    """Makes the prologue of one rank raise in one step."""
    from megatron_nsp.backends.ulysses import UlyssesForward

    prologue = UlyssesForward.prologue

    def failing(self: UlyssesForward) -> Any:
        if rank == RANK and len(STEPS) == step - 1:
            raise MemoryError("made up for the test")
        return prologue(self)

    UlyssesForward.prologue = failing


if __name__ == "__main__":
    watch_optimizer()
    watch_loss()
    watch_tokens()
    watch_groups()
    if FAIL is not None:
        fail_on_purpose(*(int(part) for part in FAIL.split(":")))
    pretrain.main()
    torch.save(STEPS, OUT / f"rank{RANK}.pt")
