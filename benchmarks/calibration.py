"""How well predictions fit real steps: the demo's model under six forced plans on CPU ranks.

    python benchmarks/calibration.py [--batches 6] [--share 0.45] [--two-hosts]

Each of four ranks gets a CPU share of its own (cgroup quota), so that a rank that waits lends its
time to nobody. The machine is profiled under the same shares with `megatron-nsp profile`; then one
run takes every batch under six plans, one after the other. Prints the simulated step beside the
measured one for each plan, medians over batches. The target: errors of at most 15%, and plans that
are predicted more than 5% apart are measured in that order.

The profile's bias is fitted to one of the plans (the leaves): optimizer, gradients and the work of
Megatron itself do not depend on the plan. The other five are predictions.

`--two-hosts` puts two ranks each into two network namespaces joined by a link of 400 Mbit/s. Both
ways need root on Linux.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "cpu")]

from comparison import Turn, write_turns  # noqa: E402
from demo import build_corpus, cost_model, draw_batches, setting  # noqa: E402
from hosts import cluster, join, launch, measured_ms, profile_worker  # noqa: E402

from megatron_nsp.cost.cost_model import CostModel  # noqa: E402
from megatron_nsp.cost.profile import load_profile  # noqa: E402
from megatron_nsp.plan.arrays import IntArray  # noqa: E402
from megatron_nsp.plan.plan import Plan  # noqa: E402
from megatron_nsp.planner import plan_batch  # noqa: E402
from megatron_nsp.simulator import StepSettings, simulate_plan  # noqa: E402
from megatron_nsp.steps.lengths import load_lengths  # noqa: E402

NUM_RANKS = 4
PLANS = ("leaves", "search", "root", "disjoint-lpt", "half", "one")
"""`half` puts every sample on the first two ranks, `one` on the first; the others are policies."""

TIE = 0.05
"""Plans that are predicted closer than this have no order: measurements scatter as much."""

MAX_ERROR = 0.15
RATE = "400mbit"


def worker(groups: str, words: list[str]) -> int:
    """One rank: joins its group, then profiles or trains."""
    join(groups, on_one_core=False)
    if words[0] == "profile":
        return profile_worker(words[1:])
    sys.argv = ["calibration.py", *words[1:]]
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode()
    from megatron_nsp.mcore import pretrain

    pretrain.main()
    return 0


def training_flags(prefix: Path, plans: Path, num_steps: int) -> list[str]:
    """The demo's recipe with replayed plans."""
    words = (ROOT / "examples" / "cpu" / "train.sh").read_text().splitlines()
    flags = []
    for line in words:
        line = line.split("#")[0].strip()
        if line.startswith("--") and not line.startswith(("--data-path", "--train-iters")):
            flags += line.split()
    flags += ["--data-path", str(prefix), "--train-iters", str(num_steps)]
    return [*flags, "--nsp-policy", f"file:{plans}"]


def forced(name: str, lengths: IntArray, cost: CostModel) -> Plan:
    """One of the six plans of a batch."""
    tree = cost.tree
    if name in ("half", "one"):
        node = tree.node(2 if name == "half" else 1, 0)
        return Plan.from_nodes(tree, lengths, [node] * len(lengths))
    return plan_batch(lengths, tree, cost, policy=name).plan


def table(turns: list[Turn], times_ms: list[float], cost: CostModel) -> int:
    """Prints predictions beside measurements; 0 when the target is met."""
    measured, predicted = {}, {}
    for policy in PLANS:
        own = [
            (turn, ms)
            for turn, ms in zip(turns, times_ms, strict=True)
            if turn.policy == policy and turn.batch > 0
        ]
        measured[policy] = median(ms for _, ms in own)
        predicted[policy] = median(
            simulate_plan(turn.plan, cost, StepSettings()).step_us / 1e3 for turn, _ in own
        )
    bias_ms = measured[PLANS[0]] - predicted[PLANS[0]]
    print(f"profile {cost.profile.name}; bias fitted to {PLANS[0]}: {bias_ms:,.0f} ms more")
    print(f"{'plan':<14} {'simulated ms':>13} {'measured ms':>12} {'error':>8}")
    worst = 0.0
    for policy in sorted(PLANS, key=lambda name: measured[name]):
        predicted[policy] += bias_ms
        error = predicted[policy] / measured[policy] - 1
        worst = max(worst, abs(error))
        print(f"{policy:<14} {predicted[policy]:>13,.0f} {measured[policy]:>12,.0f} {error:>8.1%}")
    wrong = [
        (one, other)
        for one in PLANS
        for other in PLANS
        if predicted[one] * (1 + TIE) < predicted[other] and measured[one] >= measured[other]
    ]
    print(f"order {f'WRONG: {wrong}' if wrong else 'right'}, largest error {worst:.1%}")
    return 0 if not wrong and worst <= MAX_ERROR else 1


def main() -> int:
    """Profiles, trains and compares."""
    parser = argparse.ArgumentParser(description="compare simulated with measured steps")
    parser.add_argument("--batches", type=int, default=6, help="(%(default)s); the first warms up")
    parser.add_argument("--share", type=float, default=0.45, help="of a core, each rank")
    parser.add_argument("--two-hosts", action="store_true", help="a slow link between two pairs")
    args = parser.parse_args()
    rate = RATE if args.two_hosts else None
    with cluster(NUM_RANKS, args.share, rate) as where, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        profile = folder / "calibrated.json"
        launch(__file__, where, "profile", str(profile))
        cost = replace(cost_model(), profile=load_profile(str(profile)))
        corpus = build_corpus(folder, None)
        lengths = load_lengths(str(corpus.with_suffix(".idx")))
        batches = draw_batches(lengths, args.batches)
        turns = [
            Turn(number, name, forced(name, batch.lengths, cost))
            for number, batch in enumerate(batches)
            for name in PLANS
        ]
        seed = setting("--seed")
        prefix, plans = write_turns(folder, corpus, lengths, batches, turns, seed)
        flags = training_flags(prefix, plans, len(turns))
        printed = launch(__file__, where, "train", *flags)
        return table(turns, measured_ms(printed, len(turns)), cost)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(sys.argv[2], sys.argv[3:]))
    sys.exit(main())
