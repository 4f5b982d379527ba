"""The training entry point: flags, checks, providers, then Megatron's own `pretrain`.

main() -> check flags (no process group yet) -> megatron.training.pretrain
|- provide_data   an iterator of planned steps
`- forward_step   one micro-batch
"""

import argparse
import contextlib
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.core.utils import StragglerDetector
from megatron.training import get_tokenizer, pretrain, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.config import PretrainConfigContainer
from megatron.training.global_vars import set_global_variables

from megatron_nsp.mcore import parallel_state, resume
from megatron_nsp.mcore.args import add_nsp_args, escape_help
from megatron_nsp.mcore.assumed import assume_what_is_missing, set_vocabulary
from megatron_nsp.mcore.check import check_report
from megatron_nsp.mcore.cpu.args import set_cpu_defaults
from megatron_nsp.mcore.cuda_connections import describe_connections
from megatron_nsp.mcore.data import MicroBatch, NestedDataIterator
from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.fixes import at_start
from megatron_nsp.mcore.flags import without_effect
from megatron_nsp.mcore.hooks import PlannedDocuments
from megatron_nsp.mcore.job import Job
from megatron_nsp.mcore.loss import checked_loss, per_token_loss
from megatron_nsp.mcore.model import model_config
from megatron_nsp.mcore.moe.rows import RoutedRows
from megatron_nsp.mcore.packed_seq_params import NestedSeqParams
from megatron_nsp.mcore.planning import JobPlanning
from megatron_nsp.mcore.quantized import FILLER_TOKEN, block_rows
from megatron_nsp.mcore.readers import EndOfDocument, PlanReader, ReadRows, StaticReader
from megatron_nsp.mcore.refusals import check_words
from megatron_nsp.mcore.replacements import replace_validated
from megatron_nsp.mcore.step_log import ExposedStep
from megatron_nsp.mcore.verdict import in_one_line, one_line, refuse_usage
from megatron_nsp.runtime.attention import AttentionRuntime, NestedBatch
from megatron_nsp.runtime.executor import NodeError, build_queue
from megatron_nsp.runtime.kernels import choose_kernel, choose_native
from megatron_nsp.steps.step_planner import PlannedStep, RepeatedSteps, Steps

MEGATRON_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer", "micro_batch_size": 1}
"""What `pretrain_gpt.py` falls back to, and the size of a micro-batch."""

REFUSAL_WAIT_S = 10.0
"""How long a rank that refuses lets rank 0 speak first."""


def add_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our flags to Megatron's parser and sets the defaults nested attention needs."""
    add_nsp_args(parser)
    escape_help(parser)
    parser.error = refuse_usage  # type: ignore[method-assign]
    parser.set_defaults(
        attention_dropout=0.0,
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
    check_words(sys.argv)
    with in_one_line(is_parsing=True):
        args = parse_args(add_args)
    if args.nsp_check:
        args.world_size = args.nsp_check
    with in_one_line():
        if args.use_checkpoint_args:
            load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            load_args_from_checkpoint(args)
    for name, value in MEGATRON_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    job = Job.from_args(args)
    notices = [*job.notices, *without_effect(sys.argv)]
    with in_one_line():
        validate_args(args)
        if job.config.check is None:
            set_global_variables(args)
        else:  # what set_global_variables also opens (writers of logs) is for a run
            notices += set_vocabulary(args)
    replace_validated(args)
    return args, replace(job, notices=tuple(notices))


def configure(args: argparse.Namespace, job: Job) -> PretrainConfigContainer:
    """Megatron's configuration of the run, with nested attention in its model.

    Raises:
        ValueError: Megatron or the planner's cost model refuses a flag; one line that names it.
    """
    with in_one_line():
        config = pretrain_cfg_container_from_args(args, model_config(args))
        JobPlanning.of(job)
    return config


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
        self._straggler = StragglerDetector()  # Megatron's only one: `--log-straggler`
        self._documents: tuple[PlannedDocuments | None, ...] | None = None

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
        job = Job.from_args(args)
        replace_validated(args)
        job.say_notices()
        at_start.apply()
        parallel_state.configure(job.tree)
        resume.compare_on_load(args, job)
        return cls(args, job)

    def datasets(
        self, train_val_test_num_samples: Any, vp_stage: int | None = None
    ) -> tuple[PlannedDocuments | None, ...]:
        """A dataset provider for a patched tree, whose loader asks the datasets for iterators.

        Megatron asks once for every chunk of the model; all of them get the same documents.
        """
        if self._documents is None:
            self._open_runtime()
            self._documents = self._open_documents()
        return self._documents

    def _open_documents(self) -> tuple[PlannedDocuments | None, ...]:
        planning, documents = JobPlanning.of(self.job), self.job.documents
        behind = 0 if self.args.skip_train else resume.evaluated_steps(self.args)

        def plan_train(train: Documents) -> Steps:
            return planning.train_planner(train, self.args.iteration)

        def plan_valid(valid: Documents) -> Steps:
            if not documents.evaluates_all:
                return planning.evaluation_planner(valid, behind)
            one_pass = planning.one_pass(valid)
            self.args.eval_iters = len(one_pass)
            return RepeatedSteps(one_pass)

        def plan_test(test: Documents) -> Steps:
            return planning.evaluation_planner(test, 0)

        return (
            self._planned(documents.train, plan_train, self._start_step),
            self._planned(documents.valid, plan_valid, self._start_valid_step),
            self._planned(documents.test, plan_test, self._start_test_step),
        )

    datasets.is_distributed = True  # type: ignore[attr-defined]

    def __call__(
        self, train_val_test_num_samples: Any, vp_stage: int | None = None
    ) -> tuple[Iterator[MicroBatch] | None, ...]:
        """Megatron's dataset provider: iterators of planned micro-batches, for one chunk."""
        parts = self.datasets(train_val_test_num_samples, vp_stage)
        return tuple(part.iterator() if part else None for part in parts)

    def _step_lengths(self) -> tuple[float | None, float | None]:
        """Tokens of the step that ran, and the sum of its samples' squared lengths.

        Megatron works out floating-point operations from them; it would sum over all ranks what the
        plan knows.
        """
        if self.step is None:
            return None, None
        plan = self.step.plan
        lengths = plan.lengths[plan.micro_batch >= 0].astype(float)
        return float(lengths.sum()), float((lengths**2).sum())

    def _open_runtime(self) -> None:
        training.consume_seqlen_stats_in_iteration = self._step_lengths
        groups = parallel_state.get_nested_groups()
        device = torch.device("cpu" if self.job.config.cpu else "cuda")
        self.runtime = AttentionRuntime(
            groups,
            choose_kernel(self.job.config.kernel, device),
            build_queue(device, self.job.config.overlap),
            choose_native(self.job.config.backend, device),
        )
        if dist.get_rank() == 0:
            print(self.job.describe(self.runtime.kernel.name), flush=True)
            if device.type == "cuda":
                value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
                print(*describe_connections(value, self.job.config.overlap), sep="\n", flush=True)

    def _planned(
        self,
        documents: Documents | None,
        plan: Callable[[Documents], Steps],
        on_step: Callable[[PlannedStep], None],
    ) -> PlannedDocuments | None:
        if documents is None:
            return None
        num_chunks = self.args.virtual_pipeline_model_parallel_size or 1
        return PlannedDocuments(
            lambda: self._iterator(plan(documents), documents, on_step), num_chunks
        )

    def _iterator(
        self, steps: Steps, documents: Documents, on_step: Callable[[PlannedStep], None]
    ) -> NestedDataIterator:
        iterator = NestedDataIterator(
            steps,
            self._reader(documents.with_vocabulary(get_tokenizer().vocab_size)),
            parallel_state.get_nested_groups().rank,
            self.job.size.row_multiple,
            self.job.config.overlap,
            on_step,
            FILLER_TOKEN if block_rows(self.args) > 1 else 0,
        )
        self._iterators.append(iterator)
        return iterator

    def _reader(self, documents: Documents) -> ReadRows:
        degree, end = self.job.config.static_degree, self._end_of_document()
        num_further = self.args.mtp_num_layers or 0
        if degree is None:
            return PlanReader(documents, num_further, end)
        group = mpu.get_data_parallel_group()
        row_multiple = self.job.size.row_multiple
        return StaticReader(documents, degree, row_multiple, group, num_further, end)

    def _end_of_document(self) -> EndOfDocument | None:
        restarting = [
            flag
            for flag, is_set in (
                ("--reset-position-ids", self.args.reset_position_ids),
                ("--reset-attention-mask", self.args.reset_attention_mask),
            )
            if is_set
        ]
        if not (restarting or self.args.eod_mask_loss):
            return None
        is_masked = self.args.eod_mask_loss
        return EndOfDocument(get_tokenizer().eod, is_masked, next(iter(restarting), None))

    def _start_step(self, step: PlannedStep) -> None:
        self._end_step()
        self.step = step
        self.job.log_step(step, self.last_step)

    def _start_valid_step(self, step: PlannedStep) -> None:
        self._start_test_step(step)
        resume.count_evaluated(self.args, step.number + 1)

    def _start_test_step(self, step: PlannedStep) -> None:
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
        with self._straggler(bdata=True):
            batch = next(data_iterator)
        assert self.runtime is not None
        rows = self._routed_rows(batch.nested) if self.args.num_experts else None
        params = NestedSeqParams.of(
            batch.nested, self.runtime, batch.positions, rows, batch.further
        )
        with self._straggler:
            losses = model(
                batch.tokens,
                batch.positions.unsqueeze(0),
                None,
                labels=batch.labels,
                packed_seq_params=params,
            )
        loss = partial(
            checked_loss if self.args.check_for_nan_in_loss_and_grad else per_token_loss,
            loss_mask=batch.loss_mask,
            step_has_targets=batch.step_has_targets,
        )
        return losses, loss

    def _routed_rows(self, nested: NestedBatch) -> RoutedRows:
        """The rows that this tensor-parallel rank's routers see, on every pipeline stage."""
        if not self.args.sequence_parallel:
            return RoutedRows(nested)
        ranks = self.args.tensor_model_parallel_size
        return RoutedRows(nested, mpu.get_tensor_model_parallel_rank(), ranks)

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
        return f"nsp: {', '.join(where)}: {type(error).__name__}: {one_line(error)}"


def check() -> None:
    """Says what the job of a command line would be, and starts nothing (`--nsp-check`).

    Exits with 2 and one line for flags that cannot be used.
    """
    logging.disable(logging.INFO)  # what Megatron says of its data sets
    assumed = [] if "--nsp-cpu" in sys.argv else assume_what_is_missing()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints all of its arguments
            args, job = parse_job()
            configure(args, job)
        for line in check_report(args, job, assumed):
            print(line, flush=True)
    except ValueError as error:
        refuse(error)


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
    if any(word.split("=")[0] == "--nsp-check" for word in sys.argv):
        return check()
    try:
        args, job = parse_job()
        config = configure(args, job)
    except ValueError as error:
        refuse(error)
    job.say_notices()
    at_start.apply()
    parallel_state.install(job.tree)
    resume.compare_on_load(args, job)
    trainer = Trainer(args, job)
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
