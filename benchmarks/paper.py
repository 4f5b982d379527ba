"""The cells of the NSP paper's Figures 7 and 10, simulated: speed-up over static SP, ablation.

    python benchmarks/paper.py [--batches 50] [--flexsp]

Two models, samples to 192K and 384K tokens, three length tables, batches of 2M tokens on 64 ranks,
parameters sharded over all of them; the 235B model with 8-way experts, offloaded optimizer and full
recomputation, as in the paper's section 6.1. The paper hides its GPUs; here the profile is h200-ib,
an estimate, and the length tables are not its three anonymous ones. Static SP is one degree for the
whole run, swept. Everything is simulated. `--flexsp` adds FlexSP, solved for a minute or more a
batch.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.memory import MemoryPlan, token_budget
from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.simulator.ablation import FULL, ablate
from megatron_nsp.simulator.compare import Setting, compare, run_trials
from megatron_nsp.simulator.sharding import sharding_us
from megatron_nsp.simulator.step import StepSettings
from megatron_nsp.steps.lengths import draw_batch, load_table, table_names

NUM_RANKS, BATCH_TOKENS = 64, 2_000_000
ABLATION_LONGEST = 192 * 1024
MEMORY_BYTES, SAVE_BYTES = 141e9, 12e9
PAPER = {
    ("qwen3-30b-a3b", 192): "1.20 to 1.46",
    ("qwen3-30b-a3b", 384): "1.09 to 1.48",
    ("qwen3-235b-a22b", 192): "1.25 to 1.42",
    ("qwen3-235b-a22b", 384): "1.21 to 1.41",
}
"""Speed-ups over static SP that the paper's Figure 7 shows."""

PAPER_ABLATION = {
    "qwen3-30b-a3b": "cost model 33.5, recompute 0",
    "qwen3-235b-a22b": "recompute 9.6, cost model 0.7",
}


def setting(model_name: str, max_length: int) -> Setting:
    """Tree, cost model, budget and execution of a cell."""
    model, profile = known_model(model_name), load_profile("h200-ib")
    is_large = model_name.startswith("qwen3-235b")
    experts, max_degree = (8, 64) if is_large else (1, 32)
    recompute = "full" if is_large else "none"
    memory = MemoryPlan(
        NUM_RANKS,
        expert_parallel=experts,
        offloads_optimizer=is_large,
        recompute=recompute if is_large else "selective",
    )
    cost = CostModel(
        profile,
        model.shape(expert_parallel=experts),
        SPTree.powers_of_two(NUM_RANKS, max_degree),
        recompute=recompute,
    )
    gather_us, scatter_us = sharding_us(model, profile, NUM_RANKS, 1, experts)
    save_bytes = SAVE_BYTES if is_large else 0.0
    return Setting(
        cost=cost.with_saving(save_bytes, cost.shape.saved_sizes),
        token_budget=token_budget(model, memory, MEMORY_BYTES) if is_large else None,
        num_micro_batches=None,
        longest=max_length,
        execution=StepSettings(gather_us=gather_us, scatter_us=scatter_us),
        save_bytes=save_bytes,
    )


def main() -> int:
    """Simulates all cells and prints them."""
    parser = argparse.ArgumentParser(description="simulate the NSP paper's cells")
    parser.add_argument("--batches", type=int, default=50, help="of each cell (%(default)s)")
    parser.add_argument("--models", nargs="+", default=list(PAPER_ABLATION), help="(all)")
    parser.add_argument(
        "--longest", type=int, nargs="+", default=[192, 384], help="in units of 1024 tokens (all)"
    )
    parser.add_argument("--flexsp", action="store_true", help="also FlexSP, which takes long")
    args = parser.parse_args()
    print("simulated, profile h200-ib (an estimate): speed-up over the best static degree")
    print(
        f"{'model':<16} {'longest':>7} {'lengths':<12} {'nested':>7} {'worst':>6} {'best':>6} "
        f"{'two-level':>9} {'algo. 1':>8} {'flexsp':>7}  {'paper, nested':<14} static"
    )
    for model in args.models:
        for max_length in (1024 * longest for longest in args.longest):
            rules = setting(model, max_length)
            static = [f"static-{degree}" for degree in rules.cost.tree.degrees]
            policies = [*static, "auto", "two-level", "algorithm-1"]
            policies += ["flexsp"] * args.flexsp
            for name in table_names():
                batches = [
                    draw_batch(load_table(name), BATCH_TOKENS, max_length, seed).lengths
                    for seed in range(args.batches)
                ]
                trials = list(run_trials(batches, policies, rules))
                result = compare(trials, policies, rules)
                rows = {row.policy: row for row in result.rows}
                total = {policy: float(row.step_us.sum()) for policy, row in rows.items()}

                def gain(policy: str, total: dict = total, base: str = result.reference) -> str:
                    return f"{total[base] / total[policy]:.3f}" if policy in total else "-"

                nested = rows["auto"].speedup
                print(
                    f"{model:<16} {max_length // 1024:>6}K {name:<12} {gain('auto'):>7} "
                    f"{nested.min():>6.2f} {nested.max():>6.2f} {gain('two-level'):>9} "
                    f"{gain('algorithm-1'):>8} {gain('flexsp'):>7}  "
                    f"{PAPER[model, max_length // 1024]:<14} {result.reference}",
                    flush=True,
                )
    print("\nwithout one component, longer by, % (192K, all three tables)")
    for model in args.models:
        rules = setting(model, ABLATION_LONGEST)
        batches = [
            draw_batch(load_table(name), BATCH_TOKENS, ABLATION_LONGEST, seed).lengths
            for name in table_names()
            for seed in range(max(1, args.batches // 5))
        ]
        steps = ablate(batches, rules)
        longer = {
            name: 100 * (float(np.sum(step_us) / np.sum(steps[FULL])) - 1)
            for name, step_us in steps.items()
            if name != FULL
        }
        text = ", ".join(f"{name} {value:.1f}" for name, value in longer.items())
        print(f"{model:<16} {text}; the paper: {PAPER_ABLATION[model]}")
        if rules.save_bytes:
            print(f"{model:<16} {storage(batches, rules)}")
    return 0


def storage(batches: list, rules: Setting) -> str:
    """What saving some attention outputs costs in memory and avoids in recomputation."""
    plain = replace(rules, save_bytes=0.0)
    again = [
        sum(t.breakdown.recompute_us.sum() for t in run_trials(batches, ["auto"], each))
        for each in (plain, rules)
    ]
    attention = replace(plain, cost=replace(plain.cost, recompute="selective"))
    whole = sum(t.breakdown.recompute_us.sum() for t in run_trials(batches, ["auto"], attention))
    avoided = 100 * (again[0] - again[1]) / whole
    return (
        f"{rules.save_bytes / 1e9:.0f} GB a rank avoid {avoided:.0f}% of attention's recomputation"
    )


if __name__ == "__main__":
    sys.exit(main())
