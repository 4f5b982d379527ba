"""What `--nsp-check` prints: the job of a command line, and its first steps as planned."""

import argparse
from collections.abc import Iterator

from megatron_nsp.cost.memory import MemoryPlan, activation_bytes, state_bytes
from megatron_nsp.mcore.job import Job
from megatron_nsp.mcore.layers import recomputed
from megatron_nsp.mcore.model import model_of
from megatron_nsp.mcore.planning import JobPlanning
from megatron_nsp.mcore.stages import virtual_stages
from megatron_nsp.mcore.step_log import step_line
from megatron_nsp.steps.step_planner import PlannedStep

STEPS = 3
"""How many steps are planned."""


def check_report(args: argparse.Namespace, job: Job, assumed: list[str]) -> Iterator[str]:
    """The lines of a check, without starting anything.

    Args:
        args: validated Megatron arguments.
        job: what they ask for.
        assumed: a line for each thing that is not on this machine.
    """
    yield (
        f"nsp: {args.world_size} ranks: tensor {args.tensor_model_parallel_size} x pipeline "
        f"{args.pipeline_model_parallel_size} x a domain of {job.tree.num_ranks} data-parallel "
        f"ranks, expert parallel {args.expert_model_parallel_size}"
    )
    for line in (*job.notices, *assumed):
        yield f"nsp: {line}"
    yield job.describe()
    steps = list(planned_steps(args, job))
    yield memory_line(args, job, steps)
    yield from map(step_line, steps)
    yield "nsp: checked; nothing was started"


def planned_steps(args: argparse.Namespace, job: Job) -> Iterator[PlannedStep]:
    """The first steps of the run, as it would plan them."""
    documents = job.documents.train
    if documents is None:  # --skip-train
        return
    planner = JobPlanning.of(job).train_planner(documents, 0)
    try:
        for _ in range(min(STEPS, args.train_iters or STEPS)):
            yield planner.next_step()
    finally:
        planner.close()


def memory_line(args: argparse.Namespace, job: Job, steps: list[PlannedStep]) -> str:
    """What a rank holds by the estimate of `cost/memory.py`, with the most tokens of a plan."""
    plan = MemoryPlan(
        job.tree.num_ranks,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
        shards_weights=args.use_megatron_fsdp,
        shards_optimizer=args.use_megatron_fsdp or args.use_distributed_optimizer,
        offloads_optimizer=args.optimizer_cpu_offload,
        recompute=recomputed(args),
        virtual_stages=virtual_stages(args),
    )
    model = model_of(args)
    tokens = max(
        (
            int(each.plan.token_load(m).max())
            for each in steps
            for m in range(each.plan.num_micro_batches)
        ),
        default=0,
    )
    states, held = state_bytes(model, plan), activation_bytes(model, plan) * tokens
    budget = job.config.token_budget
    limit = "no --nsp-token-budget" if budget is None else f"--nsp-token-budget {budget}"
    return (
        f"nsp: memory of a rank, estimated: {states / 1e9:.1f} GB for weights, gradients and "
        f"optimizer, {held / 1e9:.1f} GB for activations of at most {tokens} tokens in a "
        f"micro-batch ({limit})"
    )
