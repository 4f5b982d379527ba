"""What the probe writes down: wrappers around the product, which knows of none of them.

Import it after CPU mode is on.
"""

import os
import queue
import random
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import training

from megatron_nsp.mcore import pretrain
from megatron_nsp.testing.logging_group import CollectiveLog, LoggingGroup
from tests.mcore.gradients import held_gradients

STEPS: list[dict[str, Any]] = []
TOKENS: list[tuple[int, int, float]] = []
ROWS: list[tuple[int, int]] = []
LAYER_INPUTS: list[tuple[int, list[tuple[int, int]], torch.Tensor]] = []
LOG = CollectiveLog()
ROTARY_GROUPS: list[Any] = []
PADDING: list[int] = []
READS: list[tuple[int, int, int]] = []
MORE: dict[str, list[Any]] = {}


def watch_optimizer() -> None:
    """Saves every gradient just before the optimizer's step."""
    setup = training.setup_model_and_optimizer

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        models, optimizer = result[0], result[1]
        if optimizer is None:  # with --skip-train
            return result
        step = optimizer.step

        def logged_step(*a: Any, **k: Any) -> Any:
            STEPS.append(
                {
                    "grads": held_gradients(models),
                    "parameters": shapes(models),
                    "tokens": list(TOKENS),
                    "layer_inputs": list(LAYER_INPUTS),
                    "records": list(LOG.records),
                    "max_in_flight": LOG.max_in_flight,
                    "groups": groups_of_modules(models),
                    "rotary": list(ROTARY_GROUPS),
                    "padding": list(PADDING),
                    "reads": list(READS),
                    **{name: list(entries) for name, entries in MORE.items()},
                }
            )
            for entries in MORE.values():
                entries.clear()
            TOKENS.clear()
            LAYER_INPUTS.clear()
            PADDING.clear()
            READS.clear()
            LOG.clear()
            return step(*a, **k)

        optimizer.step = logged_step
        return result

    training.setup_model_and_optimizer = watched


def shapes(models: list[torch.nn.Module]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter, in the order of the model."""
    named = [pair for model in models for pair in model.named_parameters()]
    return [(name, tuple(parameter.shape)) for name, parameter in named]


def groups_of_modules(models: list[torch.nn.Module]) -> dict[str, int]:
    """Identity of every process group that a module holds, by module and attribute."""
    found = {}
    for model in models:
        for name, module in model.named_modules():
            holders = {"": vars(module), ".pg": vars(vars(module).get("pg_collection") or object)}
            for place, attributes in holders.items():
                for key, value in attributes.items():
                    if isinstance(value, torch.distributed.ProcessGroup):
                        found[f"{name}{place}.{key}"] = id(value)
    return found


def watch_rotary() -> None:
    """Saves the group each rotary call is given."""
    from megatron_nsp.mcore.rope import NestedRotaryEmbedding

    forward = NestedRotaryEmbedding.forward

    def watched(self: NestedRotaryEmbedding, *args: Any, **kwargs: Any) -> torch.Tensor:
        ROTARY_GROUPS.append(kwargs.get("cp_group"))
        return forward(self, *args, **kwargs)

    NestedRotaryEmbedding.forward = watched


def route_to_one_expert() -> None:
    """Lifts expert 0's logit above all others."""
    from megatron.core.transformer.moe.router import TopKRouter

    gating = TopKRouter.gating

    def biased(self: TopKRouter, input: torch.Tensor) -> torch.Tensor:
        logits = gating(self, input)
        lift = torch.zeros_like(logits)
        lift[..., 0] = 1e3
        return logits + lift

    TopKRouter.gating = biased
    forward = TopKRouter.forward

    def watched(self: TopKRouter, input: torch.Tensor, rows: Any) -> Any:
        PADDING.append(int(rows.is_filler.sum()))
        return forward(self, input, rows)

    TopKRouter.forward = watched


def mask_targets(before: int) -> None:
    """Takes away the targets of each document's first tokens."""
    from megatron_nsp.mcore import readers

    read_tokens = readers.read_tokens

    def masked(layout: Any, *args: Any) -> Any:
        tokens, labels, loss_mask = read_tokens(layout, *args)
        loss_mask[layout.positions < before] = 0.0
        return tokens, labels, loss_mask

    readers.read_tokens = masked


def watch_reads() -> None:
    """Saves which tokens a rank reads: document, start and stop of each call."""
    from megatron_nsp.mcore.documents import IndexedDocuments

    read = IndexedDocuments.read

    def watched(self: IndexedDocuments, document: int, start: int, stop: int) -> Any:
        READS.append((document, start, stop))
        return read(self, document, start, stop)

    IndexedDocuments.read = watched


def watch_loss() -> None:
    """Saves the loss Megatron reports, unrounded."""
    log = training.training_log

    def watched(loss_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if "lm loss" in loss_dict:  # the last pipeline stage alone has it
            STEPS[-1]["loss"] = float(loss_dict["lm loss"])
        return log(loss_dict, *args, **kwargs)

    training.training_log = watched


def watch_further_losses() -> None:
    """Saves what Megatron logs of multi-token prediction in each step, unrounded."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    track = MTPLossLoggingHelper.track_mtp_metrics

    def watched(*args: Any) -> None:
        *before, total_loss_dict = args
        losses: dict[str, torch.Tensor] = {}
        track(*before, losses)
        STEPS[-1]["mtp_losses"] = [float(losses[name]) for name in sorted(losses)]
        for name, loss in losses.items():  # on the last pipeline stage alone
            total_loss_dict[name] = total_loss_dict.get(name, torch.zeros_like(loss)) + loss
        for name in ("correct", "total") if losses else ():
            counts = MTPLossLoggingHelper.tracker[f"cumulative_{name}_values"]
            STEPS[-1][f"mtp_{name}"] = counts.tolist()

    MTPLossLoggingHelper.track_mtp_metrics = staticmethod(watched)


def watch_tokens() -> None:
    """Saves each token's loss by document and position."""
    forward = pretrain.Trainer.forward_step

    def watched(self: pretrain.Trainer, data_iterator: Any, model: Any) -> Any:
        has_losses = get_attr_wrapped_model(model, "post_process")
        if not (torch.is_grad_enabled() and has_losses):
            return forward(self, data_iterator, model)
        batches = []

        class Tap:
            def __next__(tap) -> Any:  # noqa: N805 - self is the trainer
                batches.append(next(data_iterator))
                assert self.step is not None
                documents = self.step.batch.documents
                ROWS[:] = [
                    (int(documents[sample]), position)
                    for sample, start, stop in batches[-1].nested.layout.segments
                    for position in range(start, stop)
                ]
                return batches[-1]

        losses, loss = forward(self, Tap(), model)
        (batch,) = batches
        of_rows = zip(ROWS, losses[0].tolist(), batch.loss_mask[0].tolist(), strict=False)
        TOKENS.extend((*token, value) for token, value, is_target in of_rows if is_target)
        return losses, loss

    pretrain.Trainer.forward_step = watched


def watch_layer_inputs() -> None:
    """Saves the gradient of every layer's input, a row a token; filler rows are left out."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    forward = TransformerLayer.forward

    def watched(self: TransformerLayer, hidden_states: torch.Tensor, *a: Any, **k: Any) -> Any:
        rows = list(ROWS)

        def save(grad: torch.Tensor) -> None:
            LAYER_INPUTS.append((self.layer_number, rows, grad[: len(rows), 0].clone()))

        if hidden_states.requires_grad:
            hidden_states.register_hook(save)
        return forward(self, hidden_states, *a, **k)

    TransformerLayer.forward = watched


def fill_blocks(rows: int) -> None:
    """Fills buffers as for FP8; saves of each layer's input its rows, and its fillers' largest."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_nsp.mcore import job, model

    for module in (job, model, pretrain):
        module.block_rows = lambda args: rows
    forward, fillers = TransformerLayer.forward, MORE.setdefault("fillers", [])

    def watched(self: TransformerLayer, hidden_states: torch.Tensor, *a: Any, **k: Any) -> Any:
        held = len(ROWS)
        largest = hidden_states[held:].abs().amax((1, 2)).tolist()
        fillers.append((hidden_states.shape[0], largest))
        return forward(self, hidden_states, *a, **k)

    TransformerLayer.forward = watched


def watch_groups() -> None:
    """Puts a logging group around each nested group."""
    open_runtime = pretrain.Trainer._open_runtime

    def watched(self: pretrain.Trainer) -> None:
        open_runtime(self)
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

    pretrain.Trainer._open_runtime = watched


def save_without_a_process() -> None:
    """Has Megatron pass on what a save wrote within this process.

    Its queue lives in a process of its own, for the sake of saves in the background, which these
    are not. Starting one costs each rank that saves two seconds, and it outlives a forked rank.
    """
    filesystem_async._results_queue = queue.Queue()


def delay_at_random(longest_ms: float) -> None:
    """Keeps this rank's host for a while before every step of a schedule."""
    from megatron_nsp.runtime import executor

    rng, run = random.Random(os.environ["RANK"]), executor._Playing.run

    def late(self: Any, step: Any) -> None:
        time.sleep(rng.random() * longest_ms / 1e3)
        run(self, step)

    executor._Playing.run = late  # type: ignore[method-assign]


def fail_on_purpose(rank: int, step: int, note: Path) -> None:
    """Makes the prologue of one rank raise in one step, and notes the time of day when it does."""
    from megatron_nsp.runtime.backends.node import NodeForward

    prologue = NodeForward.prologue

    def failing(self: NodeForward, number: int) -> Any:
        if rank == torch.distributed.get_rank() and len(STEPS) == step - 1:
            note.write_text(str(time.time()))
            raise MemoryError("made up for the test")
        return prologue(self, number)

    NodeForward.prologue = failing


def plan_otherwise(rank: int, step: int) -> None:
    """Makes one rank draw another document in one step."""
    from megatron_nsp.steps.step_planner import StepPlanner

    plan = StepPlanner._plan

    def other(self: StepPlanner) -> Any:
        planned = plan(self)
        if rank == torch.distributed.get_rank() and planned.number == step - 1:
            documents = planned.batch.documents
            documents[[0, 1]] = documents[[1, 0]]
        return planned

    StepPlanner._plan = other
