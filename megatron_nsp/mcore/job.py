"""What a command line asks for, checked and ready to plan: everything before a process group."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_nsp.arrays import IntArray
from megatron_nsp.config import NSPConfig, check_ranges, flag
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import Profile, load_profile
from megatron_nsp.cost.score import PlanScore
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.mcore import validate
from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.hybrid_cp import MEGATRON_POLICIES
from megatron_nsp.mcore.model import model_shape, recompute_share, recomputed, saved_sizes
from megatron_nsp.mcore.step_log import ExposedStep, step_line
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.order import ALL_ROOT_FIRST
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples, mark_saved
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import check_can_train, plan_batch, policy_names
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import choose_kernel, choose_native
from megatron_nsp.simulator.order_search import choose_orders
from megatron_nsp.steps.replay import PlanRecorder, PlanReplay
from megatron_nsp.steps.sampler import Batch, BatchSampler
from megatron_nsp.steps.step_planner import (
    MarkSaved,
    OrderNodes,
    PlanBatch,
    PlannedStep,
    StepPlanner,
    plan_carried_first,
)

REPLAY_PREFIX = "file:"


def check_policy(
    config: NSPConfig, tree: SPTree, num_micro_batches: int, heads: tuple[int, int]
) -> None:
    """Checks that the policy exists and can plan a training run.

    Args:
        config: the settings.
        tree: the SP tree.
        num_micro_batches: micro-batches of a step.
        heads: query and key/value heads on a tensor-parallel rank.

    Raises:
        ValueError: it does not or cannot, or its recorded plans are for another job.
    """
    if config.policy.startswith(REPLAY_PREFIX):
        path = config.policy.removeprefix(REPLAY_PREFIX)
        if config.record_plans and os.path.realpath(config.record_plans) == os.path.realpath(path):
            raise ValueError(f"{flag('record_plans')} {path} would overwrite the plans it replays")
        PlanReplay(path, tree, num_micro_batches, config.token_budget, heads)
        return
    names = policy_names(tree, MEGATRON_POLICIES)
    if config.policy not in names:
        raise ValueError(
            f"{flag('policy')} must be file:PATH or one of {', '.join(names)}, got {config.policy}"
        )
    try:
        check_can_train(config.policy)
    except ValueError as error:
        raise ValueError(f"{flag('policy')}: {error}") from error


def _save_nothing(plan: Plan) -> SavedSamples:
    return NOTHING_SAVED


@dataclass(frozen=True, eq=False)
class Job:
    """A checked job.

    Attributes:
        args: Megatron's arguments; those Megatron derives are there once it validated them.
        config: our settings.
        tree: the SP tree of every domain.
        num_micro_batches: micro-batches of a step, fixed for the run.
        max_length: longest sample to train on, in tokens.
        row_multiple: buffers are filled to a multiple of this many rows.
        documents: the training documents.
        valid_documents: the evaluation documents, if the run evaluates.
        profile: the planner's cost profile.
        recorder: where rank 0 records plans, if anywhere.
    """

    args: argparse.Namespace
    config: NSPConfig
    tree: SPTree
    num_micro_batches: int
    max_length: int
    row_multiple: int
    documents: Documents
    valid_documents: Documents | None
    profile: Profile
    recorder: PlanRecorder | None

    @classmethod
    def from_args(cls, args: argparse.Namespace, config: NSPConfig) -> "Job":
        """Checks everything and opens the data.

        Raises:
            ValueError: a flag cannot be used; one line that names it.
        """
        config.validate()
        check_ranges(args, validate.RANGES)
        profile = load_profile(config.profile or ("cpu-gloo" if config.cpu else "h100-ib"))
        tree = validate.job_tree(args, config, profile)
        validate.check_input_layout(config, tree.num_ranks)
        num_micro_batches = validate.check_loop(args, tree.num_ranks)
        validate.check_attention(args)
        validate.check_moe(args)
        if args.seq_length is None and config.max_length is None:
            raise ValueError("--seq-length is required: the longest sample to train on, in tokens")
        max_length = config.max_length or args.seq_length
        validate.check_positions(args, max_length)

        heads = validate.heads_per_rank(args)
        is_chunked = tree.max_degree > 1 and (
            config.backend not in ("auto", "ulysses") or not is_admissible(tree.max_degree, *heads)
        )

        def open_documents(data_flag: str, prefixes: Sequence[str] | None) -> Documents:
            documents = Documents(prefixes or (), data_flag)
            validate.check_lengths(
                config, documents, max_length, tree, data_flag, is_chunked=is_chunked
            )
            return documents

        if args.train_data_path:
            documents = open_documents("--train-data-path", args.train_data_path)
        else:
            documents = open_documents("--data-path", args.data_path)
        valid_documents = None
        if args.eval_iters:
            valid_documents = open_documents("--valid-data-path", args.valid_data_path)
        check_policy(config, tree, num_micro_batches, heads)
        device = torch.device("cpu" if config.cpu else "cuda")
        kernel = choose_kernel(config.kernel, device)
        validate.check_native(args, config)
        choose_native(config.backend, device)
        validate.check_sinks(args, kernel)
        validate.check_saving(args, config, kernel)
        is_recorder = os.environ.get("RANK", "0") == "0"
        return cls(
            args=args,
            config=config,
            tree=tree,
            num_micro_batches=num_micro_batches,
            max_length=max_length,
            row_multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1,
            documents=documents,
            valid_documents=valid_documents,
            profile=profile,
            recorder=(
                PlanRecorder(config.record_plans) if config.record_plans and is_recorder else None
            ),
        )

    def train_planner(self, first_step: int) -> tuple[StepPlanner, Documents]:
        """The planner of the training steps from `first_step` on, and its documents."""
        if first_step and os.environ.get("RANK", "0") == "0":
            print(f"nsp: going over the {first_step} steps before this run again", flush=True)
        planner = self._planner(self.documents, self._plan_batch(), first_step, self._mark_saved)
        return planner, self.documents

    def valid_planner(self) -> tuple[StepPlanner, Documents]:
        """The planner of the evaluation steps, and its documents."""
        documents = self.valid_documents
        assert documents is not None, "no --valid-data-path was opened"
        return self._planner(documents, self._search_plans(), 0, _save_nothing), documents

    def _planner(
        self, documents: Documents, plan_batch: PlanBatch, first_step: int, mark: MarkSaved
    ) -> StepPlanner:
        sampler = BatchSampler(
            documents.lengths, self.config.batch_tokens, self.max_length, self.args.seed
        )
        can_carry = self.config.token_budget is not None or self._is_replay
        return StepPlanner(
            sampler,
            plan_batch,
            self.config.plan_ahead,
            can_carry,
            first_step,
            mark,
            self._order_nodes(),
        )

    def _order_nodes(self) -> OrderNodes:
        if not self.config.overlap:
            return lambda plan: ALL_ROOT_FIRST
        cost = self._cost()
        return lambda plan: choose_orders(plan, cost)

    @property
    def _is_replay(self) -> bool:
        return self.config.policy.startswith(REPLAY_PREFIX)

    @cached_property
    def _shape(self) -> ModelShape:
        return model_shape(self.args, torch.empty(0, dtype=self.args.params_dtype).element_size())

    def _cost(self) -> CostModel:
        cost = CostModel(
            self.profile,
            self._shape,
            self.tree,
            self.config.backend,
            recompute=recomputed(self.args),
            recompute_share=recompute_share(self.args),
            overlap=self.config.overlap,
        )
        if not self._save_bytes:
            return cost
        return cost.with_saving(self._save_bytes, saved_sizes(self.args, self._shape))

    @property
    def _save_bytes(self) -> float:
        return self.config.save_budget_gb * 1e9

    @property
    def _mark_saved(self) -> MarkSaved:
        if not self._save_bytes:
            return _save_nothing
        output = saved_sizes(self.args, self._shape)
        return lambda plan: mark_saved(plan, output, self._save_bytes)

    def _plan_batch(self) -> PlanBatch:
        if not self._is_replay:
            return self._search_plans()
        path = self.config.policy.removeprefix(REPLAY_PREFIX)
        replay = PlanReplay(path, self.tree, self.num_micro_batches, self.config.token_budget)
        cost = self._cost()

        def replay_batch(batch: Batch) -> tuple[Plan, PlanScore]:
            plan = replay.plan(batch.lengths)
            return plan, cost.score(plan)

        return replay_batch

    def _search_plans(self) -> PlanBatch:
        cost, config = self._cost(), self.config
        policy = "auto" if self._is_replay else config.policy

        def search_lengths(lengths: IntArray) -> tuple[Plan, PlanScore]:
            result = plan_batch(
                lengths,
                self.tree,
                cost,
                token_budget=config.token_budget,
                num_micro_batches=self.num_micro_batches,
                policy=policy,
                compares_all=False,
                more_policies=MEGATRON_POLICIES,
            )
            return result.plan, result.score

        return lambda batch: plan_carried_first(batch, search_lengths)

    def describe(self, groups: NestedGroups, kernel_name: str) -> str:
        """One line on how the job runs."""
        estimate = " (estimate)" if self.profile.is_estimate else ""
        return (
            f"nsp: {self.tree.num_ranks} ranks in the domain, degrees {list(self.tree.degrees)}, "
            f"{groups.num_groups} of {groups.num_creations} groups on this rank, kernel "
            f"{kernel_name}, profile {self.profile.name}{estimate}, policy {self.config.policy}, "
            f"backend {self.config.backend}, input layout {self.config.input_layout}, "
            f"{self.num_micro_batches} micro-batches a step of {self.config.batch_tokens} tokens, "
            f"longest sample {self.max_length} tokens"
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
