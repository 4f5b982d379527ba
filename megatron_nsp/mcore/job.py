"""What a command line asks for, checked and ready to plan: everything before a process group."""

import argparse
import os
from dataclasses import dataclass

import torch

from megatron_nsp.config import NSPConfig, flag
from megatron_nsp.cost.profile import Profile, load_profile
from megatron_nsp.mcore import validate
from megatron_nsp.mcore.args import config_from_args
from megatron_nsp.mcore.batch_sizes import BatchSizes
from megatron_nsp.mcore.job_documents import JobDocuments
from megatron_nsp.mcore.layers import set_hybrid_layers
from megatron_nsp.mcore.policy import check_policy
from megatron_nsp.mcore.quantized import block_rows
from megatron_nsp.mcore.refusals import check_arguments, check_kernel, check_micro_batches
from megatron_nsp.mcore.replacements import apply_replacements
from megatron_nsp.mcore.sizes import heads_per_rank, longest_sample
from megatron_nsp.mcore.step_log import ExposedStep, step_line
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.kernels import choose_kernel, choose_native
from megatron_nsp.steps.replay import PlanRecorder
from megatron_nsp.steps.step_planner import PlannedStep


@dataclass(frozen=True, eq=False)
class JobSize:
    """How large the steps of a run are.

    Attributes:
        batches: tokens and micro-batches of each step.
        max_length: longest sample to train on, in tokens.
        row_multiple: buffers are filled to a multiple of this many rows.
    """

    batches: BatchSizes
    max_length: int
    row_multiple: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, lengths: IntArray, longest: int) -> "JobSize":
        """Reads it off checked arguments.

        Args:
            args: Megatron's arguments with ours.
            lengths: `[documents]` tokens of each document.
            longest: longest sample to train on, in tokens.

        Raises:
            ValueError: a batch does not divide into micro-batches.
        """
        usable = lengths[(lengths > 0) & (lengths <= longest)]
        return cls(BatchSizes.from_args(args, usable), longest, row_multiple(args))


def row_multiple(args: argparse.Namespace) -> int:
    """The multiple of rows that buffers are filled to."""
    rows = block_rows(args)
    # With sequence parallelism each tensor-parallel rank holds an equal part of the rows.
    return rows * args.tensor_model_parallel_size if args.sequence_parallel else rows


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
        notices: a line for each flag that is replaced.
        recorder: where this rank records plans, if anywhere.
    """

    args: argparse.Namespace
    config: NSPConfig
    tree: SPTree
    size: JobSize
    documents: JobDocuments
    profile: Profile
    notices: tuple[str, ...]
    recorder: PlanRecorder | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Job":
        """Checks everything and opens the data.

        Sets the arguments that are replaced, those that `--hybrid-layer-pattern` decides, and no
        evaluation where there is nothing to evaluate on.

        Raises:
            ValueError: a flag cannot be used; one line that names it.
        """
        replaced = apply_replacements(args)
        config = config_from_args(args)
        config.validate()
        if not config.cpu:
            use_own_gpu(args)
        set_hybrid_layers(args)
        check_arguments(args)
        profile = open_profile(config)
        tree = validate.job_tree(args, config, profile)
        validate.check_input_layout(config, tree.num_ranks)
        heads = heads_per_rank(args)
        documents = JobDocuments.open(args)
        documents.set_arguments(args)
        is_chunked = validate.is_always_chunked(config, tree, heads)
        longest = longest_sample(args)
        assert longest is not None, "--seq-length is checked"
        for opened in documents:
            validate.check_lengths(config, opened, longest, tree, is_chunked)
        size = JobSize.from_args(args, next(iter(documents)).lengths, longest)
        args.hybrid_context_parallel = False  # its steps are counted; nothing else is to see it
        evaluates = documents.valid is not None or documents.test is not None
        numbers = {size.batches.valid(0).num_micro_batches} if evaluates else set[int]()
        check_micro_batches(args, sorted(numbers | size.batches.micro_batch_numbers))
        check_policy(config, tree, size.batches.train, heads)
        check_kernels(args, config)
        recorder, notices = open_recorder(config), (*replaced, *documents.notices)
        return cls(args, config, tree, size, documents, profile, notices, recorder)

    def describe(self, kernel_name: str | None = None) -> str:
        """One line on how the job runs.

        Args:
            kernel_name: the kernel that was chosen; without it what the flags ask for.
        """
        nodes = [node for node in self.tree.nodes() if self.tree.degree(node) > 1]
        num_domains = self.args.world_size // self.tree.num_ranks
        estimate = " (estimate)" if self.profile.is_estimate else ""
        return (
            f"nsp: {self.tree.num_ranks} ranks in the domain, degrees {list(self.tree.degrees)}, "
            f"{len(self.tree.degrees) - (1 in self.tree.degrees)} of "
            f"{len(nodes) * num_domains} groups on this rank, kernel "
            f"{kernel_name or self.config.kernel}, profile {self.profile.name}{estimate}, "
            f"policy {self.config.policy}, backend {self.config.backend}, "
            f"input layout {self.config.input_layout}, {self.size.batches}, longest sample "
            f"{self.size.max_length} tokens"
        )

    def say_notices(self) -> None:
        """Prints on rank 0 what flags get otherwise than asked for."""
        if os.environ.get("RANK", "0") == "0" and self.notices:
            print(*(f"nsp: {notice}" for notice in self.notices), sep="\n", flush=True)

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
