"""What a command line asks for, checked and ready to plan: everything before a process group."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_nsp.config import NSPConfig, flag
from megatron_nsp.cost.profile import Profile, load_profile
from megatron_nsp.mcore import validate
from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.layers import set_hybrid_layers
from megatron_nsp.mcore.moe.dispatcher import replace_dispatcher
from megatron_nsp.mcore.policy import check_policy
from megatron_nsp.mcore.refusals import check_arguments, check_kernel
from megatron_nsp.mcore.sizes import heads_per_rank, longest_sample, set_batch_sizes
from megatron_nsp.mcore.step_log import ExposedStep, step_line
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import choose_kernel, choose_native
from megatron_nsp.steps.replay import PlanRecorder
from megatron_nsp.steps.step_planner import PlannedStep


@dataclass(frozen=True, eq=False)
class StepSize:
    """How large the steps of a run are.

    Attributes:
        num_micro_batches: micro-batches of a step, fixed for the run.
        max_length: longest sample to train on, in tokens.
        row_multiple: buffers are filled to a multiple of this many rows.
    """

    num_micro_batches: int
    max_length: int
    row_multiple: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, num_ranks: int) -> "StepSize":
        """Reads it off checked arguments whose batch sizes are set."""
        max_length = longest_sample(args)
        assert max_length is not None, "--seq-length is checked"
        row_multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
        return cls(int(args.global_batch_size) // num_ranks, max_length, row_multiple)


@dataclass(frozen=True, eq=False)
class JobDocuments:
    """The documents of a run.

    Attributes:
        train: those to train on.
        valid: those to evaluate on, if the run evaluates.
    """

    train: Documents
    valid: Documents | None

    @classmethod
    def open(cls, args: argparse.Namespace) -> "JobDocuments":
        """Opens what the flags name.

        Raises:
            ValueError: a data set does not exist or is damaged.
        """
        if args.train_data_path:
            train = Documents(args.train_data_path, "--train-data-path")
        else:
            train = Documents(args.data_path, "--data-path")
        valid = Documents(args.valid_data_path, "--valid-data-path") if args.eval_iters else None
        return cls(train, valid)

    def __iter__(self) -> Iterator[Documents]:
        """All that are open."""
        yield self.train
        if self.valid is not None:
            yield self.valid


def use_own_gpu(args: argparse.Namespace) -> None:
    """Makes the GPU of this rank the current one, as Megatron does later.

    What asks a GPU for something before would open the first one from every rank of a host.

    Raises:
        ValueError: the host has no GPU for this rank.
    """
    count = torch.cuda.device_count()
    if not count:  # a job that only checks its flags
        return
    if args.local_rank >= count:
        raise ValueError(
            f"local rank {args.local_rank} has no GPU: this host has {count}, one for each rank"
        )
    torch.cuda.set_device(args.local_rank)


def check_kernels(args: argparse.Namespace, config: NSPConfig) -> None:
    """Checks that what runs attention is installed, runs on this rank's device and does enough.

    Raises:
        ValueError: it does not; one line that names the flag.
    """
    device = torch.device("cpu" if config.cpu else "cuda")
    kernel = choose_kernel(config.kernel, device)
    choose_native(config.backend, device)
    check_kernel(args, kernel)


def open_profile(config: NSPConfig) -> Profile:
    """The planner's cost profile.

    Raises:
        ValueError: there is none of that name, or the file is no profile.
    """
    try:
        return load_profile(config.profile or ("cpu-gloo" if config.cpu else "h100-ib"))
    except ValueError as error:
        raise ValueError(f"{flag('profile')}: {error}") from error


def open_recorder(config: NSPConfig) -> PlanRecorder | None:
    """Where this rank records plans: rank 0 alone does.

    Raises:
        ValueError: there is no such folder.
    """
    is_recorder = os.environ.get("RANK", "0") == "0"
    return PlanRecorder(config.record_plans) if config.record_plans and is_recorder else None


@dataclass(frozen=True, eq=False)
class Job:
    """A checked job.

    Attributes:
        args: Megatron's arguments; those Megatron derives are there once it validated them.
        config: our settings.
        tree: the SP tree of every domain.
        size: how large its steps are.
        documents: what it trains and evaluates on.
        profile: the planner's cost profile.
        recorder: where this rank records plans, if anywhere.
    """

    args: argparse.Namespace
    config: NSPConfig
    tree: SPTree
    size: StepSize
    documents: JobDocuments
    profile: Profile
    recorder: PlanRecorder | None

    @classmethod
    def from_args(cls, args: argparse.Namespace, config: NSPConfig) -> "Job":
        """Checks everything and opens the data.

        Sets the arguments that others decide: layers of a hybrid model, batch sizes, a dispatcher.

        Raises:
            ValueError: a flag cannot be used; one line that names it.
        """
        config.validate()
        if not config.cpu:
            use_own_gpu(args)
        set_hybrid_layers(args)
        notices = replace_dispatcher(args)
        if notices and os.environ.get("RANK", "0") == "0":
            print(*(f"nsp: {notice}" for notice in notices), sep="\n", flush=True)
        check_arguments(args)
        set_batch_sizes(args)
        profile = open_profile(config)
        tree = validate.job_tree(args, config, profile)
        validate.check_input_layout(config, tree.num_ranks)
        size = StepSize.from_args(args, tree.num_ranks)

        heads = heads_per_rank(args)
        documents = JobDocuments.open(args)
        is_chunked = validate.is_always_chunked(config, tree, heads)
        for opened in documents:
            validate.check_lengths(config, opened, size.max_length, tree, is_chunked)
        check_policy(config, tree, size.num_micro_batches, heads)
        check_kernels(args, config)
        return cls(args, config, tree, size, documents, profile, open_recorder(config))

    def describe(self, groups: NestedGroups, kernel_name: str) -> str:
        """One line on how the job runs."""
        estimate = " (estimate)" if self.profile.is_estimate else ""
        return (
            f"nsp: {self.tree.num_ranks} ranks in the domain, degrees {list(self.tree.degrees)}, "
            f"{groups.num_groups} of {groups.num_creations} groups on this rank, kernel "
            f"{kernel_name}, profile {self.profile.name}{estimate}, policy {self.config.policy}, "
            f"backend {self.config.backend}, input layout {self.config.input_layout}, "
            f"{self.size.num_micro_batches} micro-batches a step of {self.config.batch_tokens} "
            f"tokens, longest sample {self.size.max_length} tokens"
        )

    def log_step(self, step: PlannedStep, before: ExposedStep | None) -> None:
        """Prints the step's line on the last rank and records its plan on rank 0."""
        if self._is_last_rank:
            print(step_line(step, before), flush=True)
        if self.recorder is not None:
            self.recorder.write(step.number, step.plan)

    def log_end(self, last: ExposedStep | None) -> None:
        """Prints on the last rank what was measured in the run's last step."""
        if last is not None and self._is_last_rank:
            print(f"nsp: {last}", flush=True)

    @property
    def _is_last_rank(self) -> bool:
        return int(os.environ.get("RANK", "0")) == self.args.world_size - 1
