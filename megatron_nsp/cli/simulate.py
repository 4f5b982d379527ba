"""`megatron-nsp simulate`: what nesting would gain over other policies, on a laptop."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nsp.cli import setting
from megatron_nsp.config import check_ranges
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import known_model
from megatron_nsp.plan.arrays import FloatArray, IntArray
from megatron_nsp.planner import policy_names
from megatron_nsp.simulator.ablation import FULL, ablate, not_ablated
from megatron_nsp.simulator.compare import (
    Comparison,
    Setting,
    Trial,
    compare,
    run_trials,
)
from megatron_nsp.simulator.sharding import sharding_us
from megatron_nsp.simulator.step import StepSettings
from megatron_nsp.steps.lengths import LengthTable, draw_batch, load_lengths

_ALIASES = ("leaves", "root", "dp", "search")
_SLOW = ("flexsp", "flexsp-10s")
"""Solved for a minute or more a batch: only where they are asked for."""

_CHEAP_POLICIES = "cheap"
_RANGES = {"batches": (1, 2**20), "micro_batches": (1, 2**20), "save_gb": (0, 2**20)}
_TOKENS_A_RANK = 32 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    setting.add_arguments(parser)
    parser.add_argument("--batches", type=int, default=10, help="batches to draw (%(default)s)")
    parser.add_argument(
        "--policies",
        default=_CHEAP_POLICIES,
        metavar="cheap|all|A,B",
        help="policies beside every static degree; 'all' are 'cheap' and flexsp, which is solved "
        "for a minute or more a batch (%(default)s)",
    )
    parser.add_argument(
        "--micro-batches", type=int, help="micro-batches of a step; without it as many as needed"
    )
    parser.add_argument("--no-overlap", action="store_true", help="finish a node before the next")
    parser.add_argument(
        "--save-gb",
        type=float,
        default=0.0,
        help="attention outputs saved instead of recomputed, 10^9 bytes a rank (%(default)s)",
    )
    parser.add_argument(
        "--no-sharding", action="store_true", help="parameters of a --model are not sharded"
    )
    parser.add_argument(
        "--ablation", action="store_true", help="also take away one component at a time"
    )
    parser.add_argument("--plot", metavar="OUT.png", help="draw figures; needs the extra viz")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Draws, plans, simulates and prints.

    Raises:
        ValueError: one line naming the flag and both numbers.
    """
    check_ranges(args, setting.RANGES | _RANGES)
    if args.plot and not (args.plot.endswith(".png") and Path(args.plot).parent.is_dir()):
        raise ValueError(f"--plot takes a .png in a folder that exists, got {args.plot}")
    cost = replace(setting.cost_model(args), overlap=not args.no_overlap)
    batches = draw_batches(args)
    policies = chosen_policies(args.policies, cost)
    rules = _setting(args, cost, batches)
    trials: list[Trial] = []
    total = len(batches) * sum(map(rules.can_hold, policies))
    for trial in run_trials(batches, policies, rules):
        trials.append(trial)
        _progress(len(trials), total)
    comparison = compare(trials, policies, rules)
    ablation = ablate(batches, rules) if args.ablation else {}
    if args.plot:
        from megatron_nsp.report.figures import draw

        draw(Path(args.plot), comparison, trials, batches, rules, ablation)
    if args.json:
        data = report(comparison, cost, batches, rules)
        data["ablation"] = {name: step_us.tolist() for name, step_us in ablation.items()}
        data["not_ablated"] = not_ablated(cost) if args.ablation else {}
        print(json.dumps(data))
    else:
        print(render(comparison, cost, batches, rules))
        print(*ablation_rows(ablation, cost), sep="\n")
    return 0


def ablation_rows(ablation: dict[str, FloatArray], cost: CostModel) -> list[str]:
    """A line for each component taken away, or why it cannot be."""
    if not ablation:
        return []
    whole_us = float(ablation[FULL].sum())
    rows = ["", f"{'without':<20} {'step ms':>10} {'slower by, %':>14}"]
    for name, step_us in ablation.items():
        slower = 100 * (float(step_us.sum()) / whole_us - 1)
        rows.append(
            f"{name if name != FULL else '-':<20} {step_us.mean() / 1e3:>10,.1f} {slower:>14.1f}"
        )
    rows += [f"{name:<20} cannot be taken away: {why}" for name, why in not_ablated(cost).items()]
    return rows


def draw_batches(args: argparse.Namespace) -> list[IntArray]:
    """The batches; each has a seed of its own.

    Without --batch-tokens they have 32K tokens a rank, or a short list is one batch.

    Raises:
        ValueError: the lengths cannot be read, or there are too few.
    """
    source, batch_tokens = load_lengths(args.lengths), args.batch_tokens
    usual = _TOKENS_A_RANK * args.ranks
    if batch_tokens is None and (isinstance(source, LengthTable) or source.sum() > 2 * usual):
        batch_tokens = usual
    return [
        draw_batch(source, batch_tokens, args.max_len, args.seed + number).lengths
        for number in range(args.batches)
    ]


def chosen_policies(text: str, cost: CostModel) -> list[str]:
    """Every static degree and the policies named.

    Raises:
        ValueError: there is no such policy.
    """
    known = policy_names(cost.tree)
    static = [name for name in known if name.startswith("static-")]
    if text in ("all", _CHEAP_POLICIES):
        left_out = (*_ALIASES, *_SLOW[1:]) if text == "all" else (*_ALIASES, *_SLOW)
        return [name for name in known if name not in left_out]
    named = text.split(",")
    for name in named:
        if name not in known:
            raise ValueError(f"--policies: no policy {name}, only cheap, all, {', '.join(known)}")
    return list(dict.fromkeys([*static, *named]))


def _setting(args: argparse.Namespace, cost: CostModel, batches: list[IntArray]) -> Setting:
    gather_us, scatter_us = 0.0, 0.0
    if args.model is not None and not args.no_sharding and cost.profile.fitted is None:
        model = known_model(args.model)
        gather_us, scatter_us = sharding_us(model, cost.profile, args.ranks, args.tp, args.ep)
    longest = max((int(lengths.max(initial=1)) for lengths in batches), default=1)
    save_bytes = args.save_gb * 1e9
    return Setting(
        cost=cost.with_saving(save_bytes, cost.shape.saved_sizes),
        token_budget=setting.budget(args, cost.profile),
        num_micro_batches=args.micro_batches,
        longest=max(args.max_len or 1, longest),
        execution=StepSettings(
            overlap=not args.no_overlap,
            gather_us=gather_us,
            scatter_us=scatter_us,
        ),
        save_bytes=save_bytes,
        token_balance=args.token_balance,
    )


def _progress(done: int, total: int) -> None:
    """A bar on standard error, where a person looks at it."""
    if sys.stderr.isatty():
        filled = 40 * done // total
        end = "\n" if done == total else ""
        bar = "#" * filled + "." * (40 - filled)
        print(f"\r[{bar}] {done}/{total}", end=end, file=sys.stderr, flush=True)


def report(
    comparison: Comparison, cost: CostModel, batches: list[IntArray], rules: Setting
) -> dict[str, Any]:
    """Everything as JSON values."""
    return {
        "profile": cost.profile.name,
        "is_estimate": cost.profile.is_estimate,
        "ranks": cost.tree.num_ranks,
        "degrees": list(cost.tree.degrees),
        "token_budget": rules.token_budget,
        "batches": [{"samples": len(lengths), "tokens": int(lengths.sum())} for lengths in batches],
        "reference": comparison.reference,
        "policies": {
            row.policy: {
                "step_us": row.step_us.tolist(),
                "speedup": row.speedup.tolist(),
                "shares": dict(row.shares),
            }
            for row in comparison.rows
        },
        "failed": dict(comparison.failed),
    }


def render(comparison: Comparison, cost: CostModel, batches: list[IntArray], rules: Setting) -> str:
    """The comparison as text for a person."""
    tokens = np.array([int(lengths.sum()) for lengths in batches])
    kind = "an estimate" if cost.profile.is_estimate else "measured"
    budget = "no token budget" if rules.token_budget is None else f"budget {rules.token_budget:,}"
    lines = [
        f"simulated {len(batches)} batches of {tokens.mean():,.0f} tokens on {cost.tree.num_ranks} "
        f"ranks, degrees to {cost.tree.max_degree}, {budget}",
        f"profile   {cost.profile.name} ({kind}): predictions, not measurements",
        "",
        f"{'policy':<20} {'step ms':>10} {'speed-up over ' + comparison.reference:>32}"
        f"   {'share of the step, %':<30}",
        f"{'':<20} {'mean':>10} {'mean':>14} {'worst':>8} {'best':>8}   "
        f"{'work':>6} {'redone':>7} {'comm':>6} {'waits':>6} {'shard':>6}",
    ]
    for row in comparison.rows:
        share = {part: 100 * value for part, value in row.shares.items()}
        lines.append(
            f"{row.policy:<20} {row.step_us.mean() / 1e3:>10,.1f} {row.speedup.mean():>14.3f} "
            f"{row.speedup.min():>8.3f} {row.speedup.max():>8.3f}   "
            f"{share['attention'] + share['dense']:>6.1f} {share['recompute']:>7.1f} "
            f"{share['exposed']:>6.1f} {share['waited'] + share['idle']:>6.1f} "
            f"{share['sharding'] + share['bias']:>6.1f}"
        )
    lines += [f"{name:<20} left out: {why}" for name, why in comparison.failed.items()]
    return "\n".join(lines)
