"""How the steps of a job are planned: at which cost, by which policy, and what plans save."""

import os
from dataclasses import dataclass
from functools import partial

import torch

from megatron_nsp.config import NSPConfig
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.score import PlanScore
from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.hybrid_cp import MEGATRON_POLICIES
from megatron_nsp.mcore.job import Job
from megatron_nsp.mcore.layers import recompute_share, recomputed
from megatron_nsp.mcore.model import model_shape, saved_sizes
from megatron_nsp.mcore.policy import replayed_path
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.order import ALL_ROOT_FIRST, NodeOrders
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples, SavedSizes, mark_saved
from megatron_nsp.planner import plan_batch
from megatron_nsp.simulator.order_search import choose_orders
from megatron_nsp.steps.replay import PlanReplay
from megatron_nsp.steps.sampler import Batch, BatchSampler, StepSizes
from megatron_nsp.steps.step_planner import (
    CarriedOf,
    PlanBatch,
    PlannedStep,
    StepPlanner,
    plan_carried_first,
)


@dataclass(frozen=True, eq=False)
class JobPlanning:
    """Plans the steps of a job whose arguments Megatron has validated.

    Attributes:
        job: the job.
        cost: its cost model.
        sizes: the sizes of what a rank saves of a token.
    """

    job: Job
    cost: CostModel
    sizes: SavedSizes

    @classmethod
    def of(cls, job: Job) -> "JobPlanning":
        """Works out what the job's model costs."""
        args, config = job.args, job.config
        shape = model_shape(args, torch.empty(0, dtype=args.params_dtype).element_size())
        sizes = saved_sizes(args, shape)
        cost = CostModel(
            job.profile,
            shape,
            job.tree,
            config.backend,
            recompute=recomputed(args),
            recompute_share=recompute_share(args),
            overlap=config.overlap,
        )
        if config.save_budget_gb:
            cost = cost.with_saving(_save_bytes(config), sizes)
        return cls(job, cost, sizes)

    def train_planner(self, documents: Documents, first_step: int) -> StepPlanner:
        """The planner of the training steps from `first_step` on."""
        if first_step and os.environ.get("RANK", "0") == "0":
            print(f"nsp: going over the {first_step} steps before this run again", flush=True)
        path = replayed_path(self.job.config)
        plan_batch, carried_of = self._searching if path is None else self._replaying(path)
        return StepPlanner(
            self._sampler(documents, self.job.size.batches.train),
            plan_batch,
            self.job.config.plan_ahead,
            carried_of,
            first_step,
            self._mark_saved,
            self._order_nodes,
        )

    def evaluation_planner(self, documents: Documents, first_step: int) -> StepPlanner:
        """The planner of evaluation steps, which are never replayed and save nothing.

        Args:
            documents: those to evaluate on.
            first_step: evaluation steps that the run made before it was resumed.
        """
        plan_batch, carried_of = self._searching
        return StepPlanner(
            self._sampler(documents, self.job.size.batches.valid),
            plan_batch,
            self.job.config.plan_ahead,
            carried_of,
            first_step,
            order_nodes=self._order_nodes,
        )

    def one_pass(self, documents: Documents) -> list[PlannedStep]:
        """The steps in which every document is evaluated once, all of them planned."""
        sampler = self._sampler(documents, self.job.size.batches.valid, once=True)
        planner, steps = StepPlanner(sampler, self._searched, 0, order_nodes=self._order_nodes), []
        while not sampler.is_over:
            steps.append(planner.next_step())
        return steps

    def _sampler(
        self, documents: Documents, size_of: StepSizes, once: bool = False
    ) -> BatchSampler:
        job = self.job
        blend = None if once else documents.blend
        return BatchSampler(
            documents.lengths, size_of, job.size.max_length, job.args.seed, blend, once
        )

    def _mark_saved(self, plan: Plan) -> SavedSamples:
        if not self.job.config.save_budget_gb:
            return NOTHING_SAVED
        return mark_saved(plan, self.sizes, _save_bytes(self.job.config))

    def _order_nodes(self, plan: Plan) -> NodeOrders:
        return choose_orders(plan, self.cost) if self.job.config.overlap else ALL_ROOT_FIRST

    def _searched(self, batch: Batch) -> tuple[Plan, PlanScore]:
        return plan_carried_first(batch, partial(self._search, batch.num_micro_batches))

    def _search(self, num_micro_batches: int, lengths: IntArray) -> tuple[Plan, PlanScore]:
        job, is_replay = self.job, replayed_path(self.job.config) is not None
        result = plan_batch(
            lengths,
            job.tree,
            self.cost,
            token_budget=job.config.token_budget,
            num_micro_batches=num_micro_batches,
            policy="auto" if is_replay else job.config.policy,
            compares_all=False,
            more_policies=MEGATRON_POLICIES,
        )
        return result.plan, result.score

    @property
    def _searching(self) -> tuple[PlanBatch, CarriedOf | None]:
        if self.job.config.token_budget is None:  # everything fits
            return self._searched, None
        return self._searched, lambda batch: self._searched(batch)[0].carried

    def _replaying(self, path: str) -> tuple[PlanBatch, CarriedOf]:
        job = self.job
        replay = PlanReplay(path, job.tree, job.size.batches.train, job.config.token_budget)

        def replay_batch(batch: Batch) -> tuple[Plan, PlanScore]:
            plan = replay.plan(batch.lengths)
            return plan, self.cost.score(plan)

        return replay_batch, lambda batch: replay.carried(batch.lengths)


def _save_bytes(config: NSPConfig) -> float:
    return config.save_budget_gb * 1e9
