"""`make demo`: nested sequence parallelism on four CPU ranks, in two minutes.

Builds a corpus with a long tail, shows the plan of its first batch, trains a small GPT in the loop
of Megatron itself, and compares nested with static sequence parallelism on the same batches.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

from comparison import NESTED, Row, compare, plan_turns, write_turns
from training_run import RECIPE, RunFailedError, Step, train

from megatron_nsp.cli.plan import render
from megatron_nsp.config import NSPConfig, build_tree
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import Model
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner import plan_batch
from megatron_nsp.steps.lengths import DrawnLengths, load_lengths
from megatron_nsp.steps.sampler import Batch, BatchSampler, always

NUM_RANKS = 4
FLOAT32_BYTES = 4


def setting(flag: str) -> int:
    """The number that the recipe gives to a flag."""
    found = re.search(rf"^ *{flag} (\d+)", RECIPE.read_text(), re.MULTILINE)
    assert found is not None, f"{RECIPE} does not set {flag}"
    return int(found[1])


def cost_model() -> CostModel:
    """The cost model that the recipe's run plans with."""
    heads, kv_heads = setting("--num-attention-heads"), setting("--num-query-groups")
    hidden = setting("--hidden-size")
    model = Model(
        name="demo",
        source=str(RECIPE),
        num_layers=setting("--num-layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=setting("--kv-channels"),
        ffn_hidden=setting("--ffn-hidden-size"),
        vocab_size=setting("--vocab-size"),
    )
    shape = model.shape(bytes_per_element=FLOAT32_BYTES)
    tree = build_tree(NSPConfig(backend="ulysses"), NUM_RANKS, heads, kv_heads)
    return CostModel(load_profile("cpu-gloo"), shape, tree)


def build_corpus(folder: Path, max_documents: int | None) -> Path:
    """Builds the corpus unless it is there; returns its prefix."""
    prefix = folder / "stdlib"
    if not prefix.with_suffix(".idx").is_file():
        command = [sys.executable, str(RECIPE.with_name("build_corpus.py"))]
        command += ["--output", str(prefix)]
        if max_documents is not None:
            command += ["--max-documents", str(max_documents)]
        subprocess.run(command, check=True)
    else:
        print(f"built before: {prefix}")
    return prefix


def draw_batches(lengths: IntArray, num_batches: int) -> list[Batch]:
    """The first batches that the recipe's run draws."""
    sampler = BatchSampler(
        lengths, always(setting("--nsp-batch-tokens")), setting("--seq-length"), setting("--seed")
    )
    return [sampler.draw() for _ in range(num_batches)]


def show_plan(batch: Batch, cost: CostModel) -> None:
    """Prints the plan of a batch."""
    result = plan_batch(batch.lengths, cost.tree, cost)
    shown = DrawnLengths(batch.lengths, batch.num_empty, len(batch.over_long))
    print(render(result, cost, shown))


def show_training(log: Path, data: Path, num_steps: int) -> None:
    """Trains and prints a line a step.

    Raises:
        RunFailedError: the run failed, or the loss did not fall.
    """
    losses = []
    print(f"{'step':>7} {'loss':>7} {'tokens':>8} {'imbalance':>10} {'ms':>7}  tokens by degree")
    for step in train(log, data, "--train-iters", str(num_steps)):
        losses.append(step.loss)
        print(_step_row(step, num_steps), flush=True)
    first, last = mean(losses[:3]), mean(losses[-3:])
    print(f"loss {first:.3f} -> {last:.3f} (mean of the first and of the last three steps)")
    if not last < first:
        raise RunFailedError(f"the loss did not fall; the log is {log}")


def _step_row(step: Step, num_steps: int) -> str:
    return (
        f"{f'{step.number}/{num_steps}':>7} {step.loss:>7.3f} {step.tokens:>8,} "
        f"{step.imbalance:>10.3f} {step.wall_ms:>7,.0f}  {step.degrees}"
    )


def show_comparison(rows: list[Row], cost: CostModel) -> None:
    """Prints the table of the comparison and how to read it."""
    print(
        f"{'':<10} {'predicted':>10} {'busiest rank':>13} {'step':>8} {'fullest rank':>13} "
        f"{'sent':>7}\n{'':<10} {'ms':>10} {'CPU ms':>13} {'ms':>8} {'tokens':>13} {'MB':>7}"
    )
    for row in rows:
        name = "nested" if row.policy == NESTED else row.policy.replace("-", " SP ")
        print(
            f"{name:<10} {row.predicted_ms:>10,.0f} {row.busiest_ms:>13,.0f} {row.wall_ms:>8,.0f} "
            f"{row.rank_tokens:>13,.0f} {row.sent_mb:>7,.1f}"
        )
    cores = os.cpu_count() or 1
    if cores < NUM_RANKS:
        print(
            f"{NUM_RANKS} ranks share {cores} cores here: a rank that waits lends its core to the "
            "others,\nwhich hides imbalance in the time of a step, not in the CPU time of the "
            "busiest rank."
        )
    if cost.profile.is_estimate:
        print(f"Predictions use the profile {cost.profile.name}: an estimate, not measured here.")
    print(
        "Inside one machine an exchange is cheap next to CPU arithmetic, so one static degree "
        "comes close;\n`megatron-nsp plan` compares for other lengths, ranks and networks."
    )


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="%(default)s")
    parser.add_argument("--steps", type=int, default=40, help="training steps (%(default)s)")
    parser.add_argument("--batches", type=int, default=7, help="batches compared (%(default)s)")
    parser.add_argument("--max-documents", type=int, help="use only the first so many files")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    start_s, cost = time.perf_counter(), cost_model()
    try:
        print("== Corpus: the source of the Python standard library ==", flush=True)
        data = build_corpus(args.folder, args.max_documents)
        lengths = load_lengths(f"{data}.idx")
        batches = draw_batches(lengths, args.batches)

        print("\n== Plan of the first batch ==")
        show_plan(batches[0], cost)

        log = args.folder / "train.log"
        print(f"\n== Training, {NUM_RANKS} ranks, log in {log} ==", flush=True)
        show_training(log, data, args.steps)

        turns, log = plan_turns(batches, cost), args.folder / "comparison.log"
        print(f"\n== Nested against static SP, {args.batches - 1} batches, log in {log} ==")
        prefix, plans = write_turns(args.folder, data, lengths, batches, turns, setting("--seed"))
        show_comparison(compare(log, prefix, plans, turns, cost), cost)
    except RunFailedError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    print(f"\ndone after {time.perf_counter() - start_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
