"""The training entry point: flags, checks, providers, then Megatron's own `pretrain`.

main() -> check flags (no process group yet) -> megatron.training.pretrain
|- provide_data   an iterator of planned steps
`- forward_step   one micro-batch
"""

import argparse
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args

from megatron_nsp.mcore import parallel_state, resume
from megatron_nsp.mcore.args import add_nsp_args, config_from_args
from megatron_nsp.mcore.cpu.args import set_cpu_defaults
from megatron_nsp.mcore.cuda_connections import describe_connections
from megatron_nsp.mcore.data import MicroBatch, NestedDataIterator
from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.fixes import at_start
from megatron_nsp.mcore.hooks import PlannedDocuments
from megatron_nsp.mcore.job import Job
from megatron_nsp.mcore.loss import checked_loss, per_token_loss
from megatron_nsp.mcore.model import model_config
from megatron_nsp.mcore.packed_seq_params import NestedSeqParams
from megatron_nsp.mcore.planning import JobPlanning
from megatron_nsp.mcore.readers import PlanReader, ReadRows, StaticReader
from megatron_nsp.mcore.step_log import ExposedStep
from megatron_nsp.runtime.attention import AttentionRuntime
from megatron_nsp.runtime.executor import NodeError, build_queue
from megatron_nsp.runtime.kernels import choose_kernel, choose_native
from megatron_nsp.steps.step_planner import PlannedStep, StepPlanner

REFUSAL_WAIT_S = 10.0
"""How long a rank that refuses lets rank 0 speak first."""


def add_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our flags to Megatron's parser and sets the defaults nested attention needs."""
    add_nsp_args(parser)
    parser.set_defaults(
        attention_dropout=0.0,
        eval_iters=0,
        eval_interval=1000,
        moe_token_dispatcher_type="alltoall",
    )
    if "--nsp-cpu" in sys.argv:
        set_cpu_defaults(parser)
    return parser


def parse_job() -> tuple[argparse.Namespace, Job]:
    """Parses and checks the command line, ours before Megatron's.

    Raises:
        ValueError: a flag cannot be used; one line that names it.
    """
    raw = parse_args(add_args)
    job = Job.from_args(raw, config_from_args(raw))
    defaults = {
        "micro_batch_size": 1,
        "global_batch_size": job.tree.num_ranks * job.size.num_micro_batches,
        "dataloader_type": "external",
    }
    try:
        args = parse_and_validate_args(add_args, args_defaults=defaults)
    except AssertionError as error:  # how Megatron refuses flags
        raise ValueError(_one_line(error)) from error
    except (AttributeError, LookupError, OSError, TypeError) as error:  # files that flags name
        raise ValueError(f"{type(error).__name__}: {_one_line(error)}") from error
    return args, dataclasses.replace(job, args=args)


def _one_line(error: BaseException) -> str:
    """An error's text in one line; an assertion often has none, then its place says more."""
    if text := str(error).strip():
        return " ".join(text.split())
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"at {place.filename}:{place.lineno}: {place.line}"


class Trainer:
    """The callbacks Megatron calls, around the state of one run.

    Args:
        args: validated Megatron arguments.
        job: what the flags ask for.

    Attributes:
        runtime: what nested attention runs with, once Megatron has asked for data.
        step: the training step that runs.
        last_step: exposed communication of the training step before.
    """

    is_distributed = True
    """Tells Megatron to build the data on every rank."""

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        """Opens nothing yet: groups and data come when Megatron calls."""
        self.args, self.job = args, job
        self.runtime: AttentionRuntime | None = None
        self.step: PlannedStep | None = None
        self.last_step: ExposedStep | None = None
        self._iterators: list[NestedDataIterator] = []
        self._documents: tuple[PlannedDocuments, PlannedDocuments | None, None] | None = None

    @classmethod
    def start(cls, args: argparse.Namespace) -> "Trainer":
        """Turns nested sequence parallelism on in a Megatron tree patched with `patches/`.

        For a script of its own, between parsing the arguments and `pretrain`, which then takes
        `datasets` as its provider.

        Args:
            args: validated Megatron arguments.

        Raises:
            ValueError: a flag cannot be used; one line that names it.
        """
        if args.dataloader_type == "single":
            args.dataloader_type = None  # Megatron's validation filled in its default
        job = Job.from_args(args, config_from_args(args))
        at_start.apply()
        parallel_state.configure(job.tree)
        resume.compare_on_load(args, job)
        return cls(args, job)

    def datasets(
        self, train_val_test_num_samples: Any, vp_stage: int | None = None
    ) -> tuple[PlannedDocuments, PlannedDocuments | None, None]:
        """A dataset provider for a patched tree, whose loader asks the datasets for iterators.

        Megatron asks once for every chunk of the model; all of them get the same documents.
        """
        if self._documents is None:
            self._open_runtime()
            self._documents = self._open_documents()
        return self._documents

    def _open_documents(self) -> tuple[PlannedDocuments, PlannedDocuments | None, None]:
        planning, documents = JobPlanning.of(self.job), self.job.documents
        num_chunks = self.args.virtual_pipeline_model_parallel_size or 1

        def open_train() -> NestedDataIterator:
            planner = planning.train_planner(self.args.iteration)
            return self._iterator(planner, documents.train, self._start_step)

        def open_valid() -> NestedDataIterator:
            assert documents.valid is not None, "opened where the run evaluates"
            return self._iterator(planning.valid_planner(), documents.valid, self._start_valid_step)

        valid = PlannedDocuments(open_valid, num_chunks) if self.args.eval_iters else None
        return PlannedDocuments(open_train, num_chunks), valid, None

    datasets.is_distributed = True  # type: ignore[attr-defined]

    def __call__(
        self, train_val_test_num_samples: Any, vp_stage: int | None = None
    ) -> tuple[Iterator[MicroBatch], Iterator[MicroBatch] | None, None]:
        """Megatron's dataset provider: iterators of planned micro-batches, for one chunk."""
        train, valid, _ = self.datasets(train_val_test_num_samples, vp_stage)
        return train.iterator(), valid.iterator() if valid else None, None

    def _open_runtime(self) -> None:
        groups = parallel_state.get_nested_groups()
        device = torch.device("cpu" if self.job.config.cpu else "cuda")
        self.runtime = AttentionRuntime(
            groups,
            choose_kernel(self.job.config.kernel, device),
            build_queue(device, self.job.config.overlap),
            choose_native(self.job.config.backend, device),
        )
        if dist.get_rank() == 0:
            print(self.job.describe(groups, self.runtime.kernel.name), flush=True)
            if device.type == "cuda":
                value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
                print(*describe_connections(value, self.job.config.overlap), sep="\n", flush=True)

    def _iterator(
        self, planner: StepPlanner, documents: Documents, on_step: Callable[[PlannedStep], None]
    ) -> NestedDataIterator:
        iterator = NestedDataIterator(
            planner,
            self._reader(documents),
            parallel_state.get_nested_groups().rank,
            self.job.size.row_multiple,
            self.job.config.overlap,
            on_step,
        )
        self._iterators.append(iterator)
        return iterator

    def _reader(self, documents: Documents) -> ReadRows:
        degree = self.job.config.static_degree
        if degree is None:
            return PlanReader(documents)
        group = mpu.get_data_parallel_group()
        return StaticReader(documents, degree, self.job.size.row_multiple, group)

    def _start_step(self, step: PlannedStep) -> None:
        self._end_step()
        self.step = step
        self.job.log_step(step, self.last_step)

    def _start_valid_step(self, step: PlannedStep) -> None:
        self._end_step()
        self.step = None  # a failure now is not one of the training step's documents

    def _end_step(self) -> None:
        """Takes down what was measured in the training step that is over, if one is."""
        assert self.runtime is not None
        exposed_ms = self.runtime.queue.exposed.take_ms()
        if self.step is not None:
            self.last_step = ExposedStep(self.step.number, exposed_ms)

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        """Megatron's forward step: the losses of one micro-batch and how to sum them."""
        batch = next(data_iterator)
        assert self.runtime is not None
        params = NestedSeqParams.of(batch.nested, self.runtime, batch.positions)
        extra = {"padding_mask": batch.padding_mask} if self.args.num_experts else {}
        losses = model(
            batch.tokens,
            batch.positions.unsqueeze(0),
            None,
            labels=batch.labels,
            packed_seq_params=params,
            **extra,
        )
        loss = partial(
            checked_loss if self.args.check_for_nan_in_loss_and_grad else per_token_loss,
            loss_mask=batch.loss_mask,
            step_has_targets=batch.step_has_targets,
        )
        return losses, loss

    def end(self) -> None:
        """Prints what was measured in the last step."""
        if self.runtime is not None:
            self._end_step()
            self.job.log_end(self.last_step)

    def close(self) -> None:
        """Stops planning ahead."""
        for iterator in self._iterators:
            iterator.close()

    def describe_failure(self, error: BaseException) -> str:
        """One line on what failed where: rank, step, node and documents."""
        where = [f"rank {os.environ.get('RANK', '0')}"]
        if self.step is not None:
            where.append(f"step {self.step.number + 1}")
        if isinstance(error, NodeError) and self.step is not None:
            documents = self.step.batch.documents[error.samples].tolist()
            where.append(f"documents {documents[:8]}{'...' if len(documents) > 8 else ''}")
        return f"nsp: {', '.join(where)}: {type(error).__name__}: {_one_line(error)}"


def refuse(error: ValueError) -> NoReturn:
    """Says from rank 0 what cannot be used, and exits with 2.

    A launcher ends the whole job as soon as one rank exits, so the others leave rank 0 the time to
    say it; its own exit then ends them. What rank 0 does not see (a file missing on another node)
    they say themselves.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"pretrain_nsp.py: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_WAIT_S)  # still here: rank 0 saw nothing wrong, this rank alone did
        rank = os.environ["RANK"]
        print(f"pretrain_nsp.py: error on rank {rank}: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Trains a GPT model with nested sequence parallelism, as the command line says.

    Exits with 2 and one line for flags that cannot be used: from rank 0 alone.
    """
    try:
        args, job = parse_job()
        model = model_config(args)  # Megatron checks the model's own flags here
    except ValueError as error:
        refuse(error)
    at_start.apply()
    parallel_state.install(job.tree)
    resume.compare_on_load(args, job)
    trainer = Trainer(args, job)
    config = pretrain_cfg_container_from_args(args, model)
    try:
        pretrain(config, trainer, ModelType.encoder_or_decoder, trainer.forward_step)
        trainer.end()
    except resume.OtherDrawError as error:
        refuse(error)
    except Exception as error:
        # The other ranks wait in a collective for this one: say what happened, then end at once,
        # without the teardown of groups that would wait for them.
        print(trainer.describe_failure(error), file=sys.stderr, flush=True)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    finally:  # also when Megatron ends the run itself, for example at --exit-interval
        trainer.close()
        if dist.is_initialized():
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
