"""Balanced experts: nested against plain data parallelism, on the same documents.

    python benchmarks/balancing.py [--steps 300] [--only RUN] [--output build/balancing]

Trains one small MoE on four CPU ranks, balanced by `aux_loss`, by `global_aux_loss` and by expert
biases. The nested runs have every document on a random node of the tree. Plain data parallelism
deals whole documents to ranks, and its routers are Megatron's own. Their `aux_loss` is of each
rank's tokens alone, another loss than that of the whole micro-batch, and shown beside it;
`global_aux_loss` and biases go by the tokens of all ranks in both. Documents are the Python
standard library's files of up to 1024 bytes, a token a byte.

Prints losses and how uneven experts are, and draws `docs/balancing.png` from all runs. A run
that is there already is not made again, and `--only` makes one, for machines that have little time
at once.

Target: over the last third of the steps the mean losses of nested and plain runs differ by less
than 1%, and the mean shares of their busiest experts by less than 0.1, with `global_aux_loss` and
with biases. Exits 1 when missed.
"""

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "cpu")]

from build_corpus import read_files, source_files, write_documents  # noqa: E402

from megatron_nsp.plan.plan import Plan  # noqa: E402
from megatron_nsp.plan.tree import SPTree  # noqa: E402
from megatron_nsp.steps.sampler import BatchSampler, always  # noqa: E402

RANKS, LONGEST, BATCH_TOKENS, EXPERTS, TOP_K, SEED = 4, 1024, 2048, 8, 2, 3
PLANS = "plans.jsonl"
PARALLELISM = {"nested": "--nsp-policy file:{folder}/" + PLANS, "plain": "--nsp-max-degree 1"}
BALANCING = {
    "aux": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
    "global": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
    "bias": "--moe-router-load-balancing-type none --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-router-bias-update-rate 1e-2",
}
RUNS = tuple(f"{parallelism}-{balancing}" for balancing in BALANCING for parallelism in PARALLELISM)
MODEL = (
    "--nsp-cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --kv-channels 16 --swiglu "
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --hidden-dropout 0 --tokenizer-type NullTokenizer "
    f"--vocab-size 256 --seq-length {LONGEST} --max-position-embeddings {LONGEST} "
    f"--num-experts {EXPERTS} --moe-router-topk {TOP_K} --moe-ffn-hidden-size 64 "
    "--expert-model-parallel-size 2 --calculate-per-token-loss --lr 3e-3 --lr-decay-style constant "
    f"--lr-warmup-iters 20 --nsp-batch-tokens {BATCH_TOKENS} --seed {SEED} --log-interval 100"
)
MAX_LOSS_DIFFERENCE, MAX_SHARE_DIFFERENCE = 0.01, 0.1


def worker(output: Path, is_plain: bool, flags: list[str]) -> None:
    """One rank of a run; writes losses and experts' tokens of every step and layer."""
    sys.argv = ["pretrain_nsp.py", *flags]
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode()
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import training

    from megatron_nsp.mcore import pretrain
    from megatron_nsp.mcore.moe.router import NestedRouter

    losses, loads, routing = [], [], NestedRouter.routing
    if is_plain:
        NestedRouter.is_aux_loss_enabled = TopKRouter.is_aux_loss_enabled
        # Ranks with and without figures of their own would add them up over different groups.
        MoEMetricsTracker._sync_metrics = lambda *_: None

        def routing(self: Any, logits: Any, padding_mask: Any) -> Any:
            # For aux_loss Megatron divides by a rank's tokens, also where there are none.
            is_training, is_empty = self.training, bool(padding_mask.is_filler.all())
            self.train(is_training and not (is_empty and "aux_loss" in flags))
            routed = TopKRouter.routing(self, logits, padding_mask.is_filler)
            self.train(is_training)  # all ranks add up what their experts got
            return routed

    def counted(self: Any, logits: Any, padding_mask: Any) -> Any:
        probs, routing_map = routing(self, logits, padding_mask)
        loads.append((routing_map & ~padding_mask.is_filler).sum(dim=0).tolist())
        return probs, routing_map

    log = training.training_log

    def logged(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        losses.append(float(loss_dict["lm loss"]))
        return log(loss_dict, *args, **kwargs)

    NestedRouter.routing, training.training_log = counted, logged
    pretrain.main()
    np.savez(output / f"{os.environ['RANK']}.npz", losses=losses, loads=loads)


def write_plans(path: Path, lengths: np.ndarray, steps: int) -> None:
    """Every document of every step on a random node."""
    tree, rng = SPTree(RANKS, (1, 2, 4)), random.Random(SEED)
    sampler, nodes = BatchSampler(lengths, always(BATCH_TOKENS), LONGEST, SEED), list(tree.nodes())
    with path.open("w") as lines:
        for batch in (sampler.draw() for _ in range(steps)):
            places = [rng.choice(nodes) for _ in batch.lengths]
            print(Plan.from_nodes(tree, batch.lengths, places).to_json(), file=lines)


def train(name: str, output: Path, steps: int) -> None:
    """Makes one run, if it is not there."""
    folder, corpus = output / name, output / "corpus"
    if (folder / f"{RANKS - 1}.npz").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    files = read_files(source_files(Path(os.__file__).parent), {"unreadable": 0, "empty": 0})
    lengths = write_documents(corpus, [each for each in files if len(each) <= LONGEST])
    parallelism, balancing = name.split("-")
    if parallelism == "nested":
        write_plans(folder / PLANS, lengths, steps)
    flags = f"{MODEL} {PARALLELISM[parallelism].format(folder=folder)} {BALANCING[balancing]}"
    flags += f" --train-iters {steps} --split 1 --eval-iters 0"
    words = ["--worker", str(folder), parallelism, *flags.split(), "--data-path", str(corpus)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with (folder / "log").open("w") as log:
        subprocess.run(
            [sys.executable, *launcher, __file__, *words],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )


def read(name: str, output: Path) -> tuple[np.ndarray, np.ndarray]:
    """`[steps]` losses, and `[steps, layers, experts]` shares of the experts: 1 if even."""
    ranks = [np.load(output / name / f"{rank}.npz") for rank in range(RANKS)]
    losses = ranks[-1]["losses"]
    tokens = sum(rank["loads"] for rank in ranks).reshape(len(losses), -1, EXPERTS)
    return losses, EXPERTS * tokens / tokens.sum(axis=2, keepdims=True)


def draw(output: Path) -> None:
    """Loss curves and the shares of the busiest and the idlest experts, of all runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    titles = {"aux": "aux_loss", "global": "global_aux_loss", "bias": "expert biases"}
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6), sharex=True, layout="constrained")
    for column, (balancing, title) in enumerate(titles.items()):
        for parallelism, style in (("plain", "-"), ("nested", "--")):
            losses, shares = read(f"{parallelism}-{balancing}", output)
            axes[0, column].plot(losses, style, label=parallelism)
            most, least = shares.max(axis=(1, 2)), shares.min(axis=(1, 2))
            (line,) = axes[1, column].plot(most, style, label=parallelism)
            axes[1, column].plot(least, style, color=line.get_color())
        axes[0, column].set(title=title, ylabel="loss of a token")
        axes[1, column].set(xlabel="step", ylabel="share: busiest, idlest expert", ylim=(0, 4))
        axes[0, column].legend()
    figure.savefig(ROOT / "docs" / "balancing.png", dpi=90)


def main() -> int:
    """Makes the runs; 0 unless nested and plain ones differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of a run")
    parser.add_argument("--only", choices=RUNS, help="make this run alone")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "balancing")
    args = parser.parse_args()
    for name in [args.only] if args.only else RUNS:
        train(name, args.output, args.steps)
    if args.only:
        return 0
    is_missed = False
    for balancing in BALANCING:
        means = {}
        for parallelism in PARALLELISM:
            losses, shares = read(f"{parallelism}-{balancing}", args.output)
            last = slice(-(-2 * len(losses) // 3), None)
            means[parallelism] = losses[last].mean(), shares[last].max(axis=2).mean()
            print(f"{parallelism}-{balancing}: loss %.4f, busiest expert %.3f" % means[parallelism])
        (loss, share), (other_loss, other_share) = means.values()
        if balancing != "aux":  # in which Megatron's plain loss is another one
            is_missed |= abs(loss / other_loss - 1) > MAX_LOSS_DIFFERENCE
            is_missed |= abs(share - other_share) > MAX_SHARE_DIFFERENCE
    draw(args.output)
    return int(is_missed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3] == "plain", sys.argv[4:])
        sys.exit()
    raise SystemExit(main())
