"""How good and how fast the planner is: gap to the lower bound, search against policies, time.

Setting: 64 ranks, 2M tokens a batch, at most 192K and 384K tokens a sample, degrees up to 32, 32
query and 4 key/value heads of 128, hidden 2048, 48 layers, profile h100-ib (an estimate), 50
batches of each of the three length tables.

The gap is the load of the plan over the lower bound, without node latency and, beside it, with it.
The search wins a batch when its plan alone is at or below the plan of every policy, both scored
from their JSON by the independent scorer of the tests. Planning is the processor time of a warm
call (search, portfolio, bound), the least of three: its wall time on a core of its own. The least
wall time stands beside it.

Usage: `python benchmarks/planner.py [--quick]`; exits 1 if a target is missed.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_nsp.cli.plan import report  # noqa: E402
from megatron_nsp.planner import CostModel, ModelShape, load_profile, plan_batch  # noqa: E402
from megatron_nsp.planner.lengths import draw_batch, load_table, table_names  # noqa: E402
from megatron_nsp.tree import SPTree  # noqa: E402
from tests.unit.scorer import score_plan  # noqa: E402

NUM_RANKS, MAX_DEGREE, BATCH_TOKENS = 64, 32, 2_000_000
MAX_LENGTHS = (192 * 1024, 384 * 1024)
NUM_BATCHES, NUM_QUICK_BATCHES, NUM_TIMED = 50, 5, 3
MAX_MEDIAN_GAP, MAX_P95_GAP, LEAST_WINS, MAX_PLAN_MS, STRETCH_PLAN_MS = 1.02, 1.06, 0.95, 15.0, 5.0

# Two sums in another order may differ in their last bits.
TIE = 1 + 1e-12


@dataclass(frozen=True)
class Row:
    """What one batch gave."""

    gap: float
    gap_no_latency: float
    is_win: bool
    cpu_ms: float
    wall_ms: float


def measure(cost: CostModel, name: str, max_length: int, seed: int) -> Row:
    """Plans one batch, then every policy's plan for the same batch."""
    batch = draw_batch(load_table(name), BATCH_TOKENS, max_length, seed)
    plan_batch(batch.lengths, cost.tree, cost)
    cpu_ms, wall_ms = [], []
    for _ in range(NUM_TIMED):
        started = time.process_time()
        result = plan_batch(batch.lengths, cost.tree, cost)
        cpu_ms.append((time.process_time() - started) * 1e3)
        wall_ms.append(result.report.plan_ms)
    profile = report(result, cost, batch)["profile"]
    loads_us = {}
    for policy in ("search", *result.report.policies):
        plan = plan_batch(batch.lengths, cost.tree, cost, policy=policy).plan
        loads_us[policy] = score_plan(plan.to_dict(), profile).load_us
    search_us = loads_us.pop("search")
    return Row(
        gap=result.report.gap,
        gap_no_latency=result.report.gap_no_latency,
        is_win=search_us <= min(loads_us.values()) * TIE,
        cpu_ms=min(cpu_ms),
        wall_ms=min(wall_ms),
    )


def summary(rows: list[Row]) -> tuple[str, list[str]]:
    """One line of the table, and the targets it misses."""
    columns = {
        field: np.array([getattr(row, field) for row in rows], dtype=float)
        for field in Row.__dataclass_fields__
    }
    median = {field: float(np.median(values)) for field, values in columns.items()}
    p95 = {field: float(np.quantile(values, 0.95)) for field, values in columns.items()}
    p99_ms = float(np.quantile(columns["cpu_ms"], 0.99))
    wins = float(columns["is_win"].mean())
    line = (
        f"{median['gap_no_latency']:>7.4f} {p95['gap_no_latency']:>7.4f} "
        f"{median['gap']:>9.4f} {p95['gap']:>7.4f} {wins:>7.0%} "
        f"{median['cpu_ms']:>8.1f} {p99_ms:>7.1f} {median['wall_ms']:>9.1f}"
    )
    checks = {
        f"median gap <= {MAX_MEDIAN_GAP}": median["gap_no_latency"] <= MAX_MEDIAN_GAP,
        f"p95 gap <= {MAX_P95_GAP}": p95["gap_no_latency"] <= MAX_P95_GAP,
        f"search wins >= {LEAST_WINS:.0%}": wins >= LEAST_WINS,
        f"planning p50 <= {MAX_PLAN_MS} ms": median["cpu_ms"] <= MAX_PLAN_MS,
    }
    return line, [name for name, is_met in checks.items() if not is_met]


def where() -> str:
    """Machine, commit and date of the measurement."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [row for row in info.read_text().splitlines() if row.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    name = commit.stdout.strip() if commit.returncode == 0 else "none"
    state = " with changes" if changes.stdout.strip() else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{cpu}, {os.cpu_count()} cores; commit {name}{state}; {today}; numpy {np.__version__}"


def main(arguments: list[str] | None = None) -> int:
    """Measures all tables, prints the results, and returns the exit status."""
    parser = argparse.ArgumentParser(description="measure the planner")
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK_BATCHES} batches each")
    args = parser.parse_args(arguments)
    num_batches = NUM_QUICK_BATCHES if args.quick else NUM_BATCHES
    cost = CostModel(
        load_profile("h100-ib"),
        ModelShape.from_hidden(48, 2048, 32, 4, 128),
        SPTree.powers_of_two(NUM_RANKS, MAX_DEGREE),
    )
    print(f"planner: {where()}")
    print(
        f"{num_batches} batches of {BATCH_TOKENS:,} tokens, {NUM_RANKS} ranks, h100-ib (estimate)"
    )
    print(f"{'':22} {'gap without latency':>15} {'with latency':>13} {'search':>11} {'CPU ms':>13}")
    print(
        f"{'table':<12} {'longest':>8}  {'median':>7} {'p95':>7} {'median':>9} {'p95':>7} "
        f"{'wins':>7} {'p50':>8} {'p99':>7} {'wall p50':>9}"
    )
    missed = []
    for name in table_names():
        for max_length in MAX_LENGTHS:
            rows = [measure(cost, name, max_length, seed) for seed in range(num_batches)]
            line, misses = summary(rows)
            print(f"{name:<12} {max_length:>8}  {line}", flush=True)
            missed += [f"{name} {max_length}: {miss} missed" for miss in misses]
    print(
        f"targets: gap median {MAX_MEDIAN_GAP}, p95 {MAX_P95_GAP} without latency; search wins "
        f"{LEAST_WINS:.0%}; planning p50 {MAX_PLAN_MS:.0f} ms (stretch {STRETCH_PLAN_MS:.0f} ms)"
    )
    print("\n".join(missed) or "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
