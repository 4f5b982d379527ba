"""`megatron-nsp plan`: plans a batch of lengths, and shows the plan and what it gains."""

import argparse
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_nsp.cli import setting
from megatron_nsp.config import check_ranges
from megatron_nsp.cost.cost_model import BWD_DENSE_FACTOR, CostModel
from megatron_nsp.cost.node_cost import BWD_ATTENTION_FACTOR
from megatron_nsp.plan.plan import Plan
from megatron_nsp.planner import PlanResult, plan_batch
from megatron_nsp.steps.lengths import DrawnLengths, draw_batch, load_lengths

_BAR_WIDTH = 40
_MOST_NODE_ROWS = 40
_NUM_CALLS = 2
"""The first call pays for imports and caches; the second is what a training step would see."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    setting.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Plans and prints.

    Raises:
        ValueError: one line naming the flag and both numbers.
    """
    check_ranges(args, setting.RANGES)
    cost = setting.cost_model(args)
    token_budget = setting.budget(args, cost.profile)
    source = load_lengths(args.lengths)
    batch = draw_batch(source, args.batch_tokens, args.max_len, args.seed)
    for _ in range(_NUM_CALLS):
        result = _plan(batch, cost, token_budget, args.token_balance)
    if args.json:
        print(json.dumps(report(result, cost, batch)))
    else:
        print(render(result, cost, batch))
    return 0


def _plan(
    batch: DrawnLengths, cost: CostModel, token_budget: int | None, token_balance: float | None
) -> PlanResult:
    """Plans with as many micro-batches as the budget needs."""
    try:
        return plan_batch(
            batch.lengths,
            cost.tree,
            cost,
            token_budget=token_budget,
            token_balance=token_balance,
            num_micro_batches=None,
        )
    except ValueError as error:
        message = str(error).replace("the token budget of", "--token-budget")
        message = message.replace("the token balance", "--token-balance")
        raise ValueError(message) from error


def report(result: PlanResult, cost: CostModel, batch: DrawnLengths) -> dict[str, Any]:
    """Everything about a plan as JSON values; `profile` holds every constant of the cost model."""
    plan, facts = result.plan, result.report
    tokens = [plan.token_load(m) for m in range(plan.num_micro_batches)]
    return {
        "plan": plan.to_dict(),
        "load_us": result.score.rank_load_us.tolist(),
        "token_load": np.sum(tokens, axis=0).tolist(),
        "token_load_by_micro_batch": [load.tolist() for load in tokens],
        "step_us": facts.load_us,
        "bound_us": facts.bound_us,
        "gap": facts.gap,
        "gap_no_latency": facts.gap_no_latency,
        "bias_us": result.score.bias_us,
        "policy": facts.policy,
        "policies": facts.policies,
        "infeasible": list(facts.infeasible),
        "search_load_us": facts.search_load_us,
        "plan_ms": facts.plan_ms,
        "num_dropped": batch.num_dropped,
        "num_over_long": batch.num_over_long,
        "profile": {
            **cost.profile.to_dict(),
            "backend": cost.backend,
            "recompute": cost.recompute,
            "recompute_share": cost.recompute_share,
            "save_tokens": cost.save_tokens,
            "overlap": cost.overlap,
            "bwd_attention_factor": BWD_ATTENTION_FACTOR,
            "bwd_dense_factor": BWD_DENSE_FACTOR,
            "model": asdict(cost.shape),
        },
        "digest": plan.digest,
    }


def render(result: PlanResult, cost: CostModel, batch: DrawnLengths) -> str:
    """The plan as text for a person: batch, nodes, ranks, and how good it is."""
    plan, facts = result.plan, result.report
    kind = "estimate" if cost.profile.is_estimate else "measured"
    left_out = [
        f"{batch.num_dropped} samples without tokens dropped" * (batch.num_dropped > 0),
        f"{batch.num_over_long} over-long samples left out" * (batch.num_over_long > 0),
    ]
    lines = [
        f"batch     {plan.num_samples:,} samples, {int(plan.lengths.sum()):,} tokens, longest "
        f"{int(plan.lengths.max(initial=0)):,}" + "".join(f"; {text}" for text in left_out if text),
        f"tree      {plan.tree.num_ranks} ranks, degrees {', '.join(map(str, plan.tree.degrees))}",
        f"profile   {cost.profile.name} ({kind}, {cost.profile.date})",
    ]
    for micro_batch in range(plan.num_micro_batches):
        if plan.num_micro_batches > 1:
            lines += ["", f"micro-batch {micro_batch}"]
        lines += ["", *_node_rows(plan, micro_batch), "", *_rank_rows(result, micro_batch)]
    busy_us = result.score.rank_load_us
    imbalance = float(busy_us.max() / busy_us.mean()) if busy_us.any() else 1.0
    lines += [
        "",
        f"step      {facts.load_us / 1e3:,.1f} ms, found by {facts.policy}",
        f"imbalance {imbalance:.3f} (slowest rank over mean)",
        f"gap       {facts.gap:.4f} to the lower bound of {facts.bound_us / 1e3:,.1f} ms; "
        f"{facts.gap_no_latency:.4f} without node latency",
    ]
    if facts.policies:
        best = min(facts.policies, key=lambda name: facts.policies[name])
        best_us = facts.policies[best]
        lines.append(
            f"baseline  {best} is the best other policy: {best_us / 1e3:,.1f} ms, "
            f"{best_us / max(facts.load_us, 1e-9):.3f} times as long"
        )
    lines.append(f"planning  {facts.plan_ms:.1f} ms")
    return "\n".join(lines)


def _node_rows(plan: Plan, micro_batch: int) -> list[str]:
    """One row an active node; leaves share a row when there are many."""
    rows = [f"{'node':>8} {'degree':>7} {'samples':>8} {'tokens':>12}  longest"]
    is_plain = all(key[0] != micro_batch for key in plan.splits)
    rows[0] += "" if is_plain else f"{'backend':>13}"
    nodes = plan.active_nodes(micro_batch)
    leaves = [node for node in nodes if plan.tree.degree(node) == 1]
    share_row = len(nodes) > _MOST_NODE_ROWS and len(leaves) > 1
    for node in nodes:
        if share_row and plan.tree.degree(node) == 1:
            continue
        lengths = plan.lengths[plan.samples_of(node, micro_batch)]
        rows.append(
            f"{plan.tree.label(node):>8} {plan.tree.degree(node):>7} {len(lengths):>8,} "
            f"{int(lengths.sum()):>12,}  {int(lengths.max()):<7,}".rstrip()
            + ("" if is_plain else f" {plan.backend_of(node, micro_batch):>12}")
        )
    if share_row:
        held = [plan.lengths[plan.samples_of(node, micro_batch)] for node in leaves]
        tokens = [int(lengths.sum()) for lengths in held]
        rows.append(
            f"{'1:*':>8} {1:>7} {sum(map(len, held)):>8,} {sum(tokens):>12,}  "
            f"{max(int(lengths.max()) for lengths in held):,}  ({len(leaves)} leaves, "
            f"{min(tokens):,} to {max(tokens):,} tokens each)"
        )
    return rows


def _rank_rows(result: PlanResult, micro_batch: int) -> list[str]:
    """One row a rank: a bar as long as its load, its time and its tokens."""
    score = result.score
    busy_us = (score.fwd_us + score.bwd_us + 2 * score.latency_us)[micro_batch]
    longest_us = max(float(busy_us.max()), 1e-9)
    tokens = result.plan.token_load(micro_batch)
    rows = [f"{'rank':>8}  {'load':<{_BAR_WIDTH}} {'ms':>12} {'tokens':>10}"]
    for rank, (load_us, held) in enumerate(zip(busy_us.tolist(), tokens.tolist(), strict=True)):
        bar = "#" * round(_BAR_WIDTH * load_us / longest_us)
        rows.append(f"{rank:>8}  {bar:<{_BAR_WIDTH}} {load_us / 1e3:>12,.1f} {held:>10,}")
    return rows
