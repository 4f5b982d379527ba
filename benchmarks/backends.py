"""What choosing how nodes divide attention gains over Ulysses alone, in the model (no measurement).

    python benchmarks/backends.py [--batches 10]

Qwen3-30B-A3B (32 query and 4 key/value heads) on 64 ranks of profile h200-ib, hosts of 8. First a
node by itself: the attention of one sample, forward and backward, under every split, simulated with
streaming. Then whole steps: the same batches planned with Ulysses alone and with `auto`, simulated,
and the plans of `auto` with all nodes back to Ulysses.
Exits 1 if `auto` is predicted to be slower than Ulysses anywhere.
"""

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.simulator import simulate_plan
from megatron_nsp.steps.lengths import draw_batch, load_table

MODEL, PROFILE, NUM_RANKS = "qwen3-30b-a3b", "h200-ib", 64
DEGREES, LENGTHS = (8, 16, 32, 64), (8, 16, 32, 64, 128, 256, 512)
TRACES = (("paper-mix", 192), ("paper-mix", 384), ("wikipedia", 192))


def cost_model(backend: str, max_degree: int) -> CostModel:
    """The setting, with degrees up to `max_degree`."""
    tree = SPTree.powers_of_two(NUM_RANKS, max_degree)
    return CostModel(load_profile(PROFILE), known_model(MODEL).shape(), tree, backend)


def attention_ms(cost: CostModel, degree: int, length: int) -> dict[str, float]:
    """Attention of one sample on a node of its own, by split."""
    node = cost.tree.node(degree, 0)
    times = {}
    for split in cost.splits[cost.tree.degrees.index(degree)]:
        plan = Plan.from_nodes(cost.tree, [length], [node], splits={(0, node): split})
        found = simulate_plan(plan, cost)
        busy_us = found.attention_us + found.exposed_us + found.waited_us
        times[plan.backend_of(node)] = float(busy_us.max()) / 1e3
    return times


def compare_steps(trace: str, thousands: int, num_batches: int) -> bool:
    """Prints a line for a trace; whether `auto` was never predicted to be slower."""
    predicted, simulated, unsplit, counts = [], [], [], Counter()
    costs = {
        "ulysses": cost_model("ulysses", 32),
        "auto, to 32": cost_model("auto", 32),
        "auto, to 64": cost_model("auto", 64),
    }
    for seed in range(num_batches):
        lengths = draw_batch(load_table(trace), 2**21, thousands * 1024, seed).lengths
        row = []
        for name, cost in costs.items():
            result = plan_batch(lengths, cost.tree, cost, compares_all=False)
            row.append((result.report.load_us, simulate_plan(result.plan, cost).step_us))
            if name == "auto, to 32":
                plain = replace(result.plan, splits={})
                unsplit.append(simulate_plan(plain, cost).step_us)
            if name == "auto, to 64":
                nodes = result.plan.active_nodes()
                names = [result.plan.backend_of(n) for n in nodes if result.plan.tree.degree(n) > 1]
                counts.update(names)
        predicted.append([one for one, _ in row])
        simulated.append([other for _, other in row])
    gains = []
    for times in (np.array(predicted), np.array(simulated)):
        gains += [100 * (1 - times[:, k].sum() / times[:, 0].sum()) for k in (1, 2)]
    gains.append(100 * (1 - sum(unsplit) / np.array(simulated)[:, 0].sum()))
    nodes = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(
        f"{trace:>10} {thousands:>4}K " + " ".join(f"{gain:>9.2f}" for gain in gains), "  ", nodes
    )
    return bool((np.array(predicted)[:, 1] <= np.array(predicted)[:, 0]).all())


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=10)
    args = parser.parse_args()
    cost = cost_model("auto", 64)
    print("attention of one sample, simulated ms: Ulysses, and the fastest split")
    for degree in DEGREES:
        for thousands in LENGTHS:
            times = attention_ms(cost, degree, thousands * 1024)
            plain, best = times.get("ulysses"), min(times, key=times.__getitem__)
            gain = f"{100 * (1 - times[best] / plain):6.2f}%" if plain else "      -"
            whole = f"{plain:12,.1f}" if plain else f"{'-':>12}"
            print(f"{degree:>4} {thousands:>5}K {whole} {times[best]:12,.1f} {gain}  {best}")
    print("\nshorter step than with Ulysses alone (degrees to 32), %, and nodes of 'auto, to 64'")
    print(" " * 17 + "predicted: to 32, 64; simulated: to 32, 64, and to 32 all Ulysses")
    is_never_slower = [compare_steps(*trace, args.batches) for trace in TRACES]
    return 0 if all(is_never_slower) else 1


if __name__ == "__main__":
    raise SystemExit(main())
