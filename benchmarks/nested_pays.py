"""Nesting pays: real training steps under nested and fixed parallelism, over a slow link.

    python benchmarks/nested_pays.py [--batches 20] [--share 0.42] [--rate 400mbit]

Four ranks with a CPU quota each, two on either side of a slow link. Documents are drawn from a
shipped length table, scaled so that its longest is 4096 tokens; a step is 16,384 tokens in four
micro-batches, and the token budget is such that the longest document needs all four ranks, as a
long document needs many GPUs. The machine is profiled under the same shares and link, and every
policy plans with that profile. One run takes every batch under every policy, one right after the
other; static degrees that cannot hold the longest document run without the budget, to show what
they would take. The link is set so that static SP over all ranks spends about a third of its step
in communication.

Target: 1.25 times as fast as the best static degree that keeps the budget. Exits 1 below. Needs
root on Linux.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "cpu")]

from build_corpus import write_documents  # noqa: E402
from comparison import Turn, write_turns  # noqa: E402
from hosts import add_cluster_flags, cluster, join, launch, profile_worker  # noqa: E402
from traced import Part, read_steps, train  # noqa: E402

from megatron_nsp.cost.cost_model import CostModel  # noqa: E402
from megatron_nsp.cost.models import Model  # noqa: E402
from megatron_nsp.cost.profile import load_profile  # noqa: E402
from megatron_nsp.plan.arrays import IntArray  # noqa: E402
from megatron_nsp.plan.plan import Plan  # noqa: E402
from megatron_nsp.plan.tree import SPTree  # noqa: E402
from megatron_nsp.planner import plan_batch  # noqa: E402
from megatron_nsp.steps.lengths import load_table, table_names  # noqa: E402
from megatron_nsp.steps.sampler import Batch, BatchSampler, always  # noqa: E402

TREE = SPTree(4, (1, 2, 4))
LAYERS, HIDDEN, FFN, HEADS, HEAD_DIM, SEED = 2, 128, 384, 8, 16, 15
LONGEST, TABLE_LONGEST = 4096, 192 * 1024
BATCH_TOKENS, MICRO_BATCHES, BUDGET = 16_384, 4, 1_280
NESTED = "auto"
POLICIES = (NESTED, "static-4", "two-level", "basp", "static-2", "static-1")
MIN_SPEED_UP = 1.25


@dataclass(frozen=True)
class Policy:
    """A policy and its plans of all batches.

    Attributes:
        name: its name.
        budget: the token budget it plans with.
        plans: one a batch; None: it refuses some batch.
    """

    name: str
    budget: int | None
    plans: list[Plan] | None


def worker(groups: str, words: list[str]) -> int:
    """One rank: joins its group, then profiles or trains."""
    join(groups)
    if words[0] == "profile":
        return profile_worker(words[1:])
    train(words[1], False, words[2:])
    return 0


def draw_documents(table: str, num_tokens: int) -> list[np.ndarray]:
    """Documents of random tokens: lengths of the table, scaled, up to the longest."""
    generator, documents, total = np.random.default_rng(SEED), [], 0
    for some in load_table(table).draw(generator):
        for length in some[some <= TABLE_LONGEST]:
            scaled = max(1, round(length * LONGEST / TABLE_LONGEST))
            documents.append(generator.integers(0, 255, scaled).astype(np.uint8))
            total += scaled
            if total >= num_tokens:
                return documents
    raise AssertionError("a table never ends")


def cost_model(profile: Path) -> CostModel:
    """The cost model of the run."""
    model = Model(
        name="nested pays",
        source=__file__,
        num_layers=LAYERS,
        hidden=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        ffn_hidden=FFN,
        vocab_size=256,
    )
    return CostModel(load_profile(str(profile)), model.shape(bytes_per_element=4), TREE)


def plan_all(name: str, batches: Sequence[Batch], cost: CostModel) -> Policy:
    """A policy's plans under the budget; where that cannot be, without one; else none."""
    reasons = []
    for budget in (BUDGET, None):
        try:
            plans = [
                plan_batch(
                    batch.lengths,
                    TREE,
                    cost,
                    token_budget=budget,
                    num_micro_batches=MICRO_BATCHES,
                    policy=name,
                ).plan
                for batch in batches
            ]
        except ValueError as error:
            reasons.append(str(error))
            continue
        if not any(len(plan.carried) for plan in plans):
            return Policy(name, budget, plans)
        reasons.append(f"budget {budget}: samples are carried over")
    print(f"{name} is left out: {'; '.join(reasons)}")
    return Policy(name, None, None)


def training_flags(prefix: Path, plans: Path, profile: Path, num_steps: int) -> list[str]:
    """The command line of the run."""
    flags = (
        f"--nsp-cpu --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --swiglu "
        f"--normalization RMSNorm --disable-bias-linear --num-attention-heads {HEADS} "
        f"--kv-channels {HEAD_DIM} --position-embedding-type rope --hidden-dropout 0 "
        f"--seq-length {LONGEST} --max-position-embeddings {LONGEST} "
        "--calculate-per-token-loss --tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-3 "
        f"--log-interval 1 --seed {SEED} --nsp-batch-tokens {BATCH_TOKENS} "
        f"--train-data-path {prefix} "
        f"--global-batch-size {TREE.num_ranks * MICRO_BATCHES} "
        f"--nsp-policy file:{plans} --nsp-profile {profile} --train-iters {num_steps}"
    )
    return flags.split()


def show(turns: Sequence[Turn], steps: list[list[Part]], policies: Sequence[Policy]) -> int:
    """Prints a line a policy, means over its steps; 0 when the target is met."""
    wall_ms = {}
    print(
        f"{'policy':<10} {'budget':>7} {'step ms':>9} | mean over ranks, ms: {'compute':>9} "
        f"{'exposed':>9} {'waited':>9} | by rank: compute+exposed+waited"
    )
    for policy in policies:
        own = [
            step
            for turn, step in zip(turns, steps, strict=True)
            if turn.policy == policy.name and turn.batch > 0
        ]
        ranks = [
            {
                what: mean(getattr(step[rank], what) for step in own)
                for what in ("wall", "compute", "exposed", "waited")
            }
            for rank in range(TREE.num_ranks)
        ]
        over = {what: mean(rank[what] for rank in ranks) for what in ranks[0]}
        wall_ms[policy.name] = over["wall"]
        each = ", ".join(
            f"{r['compute']:,.0f}+{r['exposed']:,.0f}+{r['waited']:,.0f}" for r in ranks
        )
        print(
            f"{policy.name:<10} {policy.budget or 'over':>7} {over['wall']:>9,.0f} | "
            f"{'':<20} {over['compute']:>9,.0f} {over['exposed']:>9,.0f} {over['waited']:>9,.0f} | "
            f"{each}"
        )
    is_static = {p.name for p in policies if p.budget and p.name.startswith("static-")}
    rivals = {name: wall_ms[name] for name in is_static}
    best = min(rivals, key=lambda name: rivals[name])
    speed_up = rivals[best] / wall_ms[NESTED]
    print(f"nested is {speed_up:.2f} times as fast as {best} (target {MIN_SPEED_UP})")
    return 0 if speed_up >= MIN_SPEED_UP else 1


def interleave(policies: Sequence[Policy], num_batches: int) -> list[Turn]:
    """The steps in their order: each batch under every policy, another one first each time."""
    turns = []
    for number in range(num_batches):
        start = number % len(policies)
        for policy in (*policies[start:], *policies[:start]):
            assert policy.plans is not None
            turns.append(Turn(number, policy.name, policy.plans[number]))
    return turns


def describe(batches: Sequence[Batch], kept: IntArray) -> None:
    """Prints what the batches hold."""
    lengths = np.concatenate([batch.lengths for batch in batches])
    longest = [int(batch.lengths.max()) for batch in batches]
    print(
        f"{len(batches)} batches of {len(lengths) / len(batches):.0f} documents; half are shorter "
        f"than {np.median(kept):.0f} tokens, longest of each batch {sorted(longest, reverse=True)}"
    )


def main() -> int:
    """Profiles, plans, trains and compares."""
    parser = argparse.ArgumentParser(description="nested against fixed parallelism")
    parser.add_argument("--batches", type=int, default=20, help="that count (%(default)s)")
    parser.add_argument("--lengths", choices=table_names(), default="paper-mix")
    parser.add_argument("--profile", type=Path, help="use this one, or measure and keep it there")
    add_cluster_flags(parser, share=0.42, rate="400mbit")
    args = parser.parse_args()
    with (
        cluster(TREE.num_ranks, args.share, args.rate) as where,
        tempfile.TemporaryDirectory() as place,
    ):
        folder = Path(place)
        profile = args.profile or folder / "calibrated.json"
        if not profile.exists():
            sizes = f"--layers {LAYERS} --hidden {HIDDEN} --ffn-hidden {FFN} --heads {HEADS} "
            sizes += f"--kv-heads {HEADS} --head-dim {HEAD_DIM}"
            launch(__file__, where, "profile", str(profile), *sizes.split())
        cost, num_batches = cost_model(profile), args.batches + 1
        documents = draw_documents(args.lengths, (num_batches + 1) * (BATCH_TOKENS + LONGEST))
        kept = write_documents(folder / "corpus", documents)
        sampler = BatchSampler(kept, always(BATCH_TOKENS), LONGEST, SEED)
        batches = [sampler.draw() for _ in range(num_batches)]
        describe(batches, kept)
        policies = [p for p in (plan_all(name, batches, cost) for name in POLICIES) if p.plans]
        turns = interleave(policies, num_batches)
        prefix, plans = write_turns(folder, folder / "corpus", kept, batches, turns, SEED)
        flags = training_flags(prefix, plans, profile, len(turns))
        launch(__file__, where, "train", str(folder), *flags)
        return show(turns, read_steps(folder, TREE.num_ranks), policies)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(sys.argv[2], sys.argv[3:]))
    sys.exit(main())
