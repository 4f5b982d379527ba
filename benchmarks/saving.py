"""What saving attention outputs costs in memory and spares in time, in a real training run.

    python benchmarks/saving.py [--batches 8] [--ranks 4]

Trains the demo's model on CPU ranks, on documents of up to 2048 tokens, so that a rank holds
several of them: a document is saved whole or not at all. Every batch runs four times with the same
plan, one step after the other: nothing recomputed, then all layers recomputed with budgets of
nothing, half of what the fullest rank would save, and everything. So all four see the same machine.
Bytes are counted in the first batch, as whole storages that autograd (seen by saved-tensor hooks,
parameters left out) and the micro-batch's store hold between forward and backward; times come from
the batches after it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODES = ("nothing recomputed", "budget 0", "budget half", "budget inf")
# The demo's model (examples/cpu/train.sh).
MODEL = (  # noqa: SIM905 - reads as the command line it is
    "--nsp-cpu --num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --num-attention-heads 4 --kv-channels 16 "
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--hidden-dropout 0 --seq-length 2048 --max-position-embeddings 2048 "
    "--calculate-per-token-loss --tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-3 "
    "--log-interval 1 --nsp-batch-tokens 20480 --nsp-policy search --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
).split()


def worker() -> None:
    """One rank of the training run; prints what each mode holds beside Megatron's log."""
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode()
    import dataclasses

    import torch
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import training

    from megatron_nsp.mcore import pretrain
    from megatron_nsp.mcore.data import MicroBatch
    from megatron_nsp.mcore.model import model_shape, saved_sizes
    from megatron_nsp.plan.saving import NOTHING_SAVED, mark_saved

    def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
        found = [tensor.untyped_storage() for tensor in tensors]
        return {storage.data_ptr(): storage.nbytes() for storage in found}

    class CyclingTrainer(pretrain.Trainer):
        """Runs every batch once in each mode."""

        drawn: MicroBatch | None = None
        number = 0

        def forward_step(self, data_iterator: Any, model: Any) -> Any:
            mode, is_first = self.number % len(MODES), self.number < len(MODES)
            if mode == 0:
                self.drawn = next(data_iterator)
            self.number += 1
            assert self.drawn is not None
            plan, output = self.drawn.nested.plan, saved_sizes(self.args, model_shape(self.args, 4))
            everything = mark_saved(plan, output, float("inf"))
            half = mark_saved(plan, output, everything.rank_bytes / 2)
            saved = (NOTHING_SAVED, NOTHING_SAVED, half, everything)[mode]
            nested = dataclasses.replace(self.drawn.nested, saved_samples=saved, saved_outputs={})
            batch = dataclasses.replace(self.drawn, nested=nested)
            config = get_attr_wrapped_model(model, "config")
            config.recompute_granularity = "full" if mode else None
            if not is_first:
                return super().forward_step(iter([batch]), model)
            return self.counted(batch, model, mode)

        def counted(self, batch: MicroBatch, model: Any, mode: int) -> Any:
            held: list[torch.Tensor] = []

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                held.append(tensor)  # no longer than until the next line: backward keeps its own
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = super().forward_step(iter([batch]), model)
            layers = batch.nested.saved_outputs.values()
            outputs = [output for layer in layers for output in layer.values()]
            store = storages([x for each in outputs for x in (each.out_THV, each.lse_hS)])
            weights = storages([parameter.data for parameter in model.parameters()])
            everything = storages(held) | store
            total = sum(size for place, size in everything.items() if place not in weights)
            rank = torch.distributed.get_rank()
            print(f"held rank {rank} mode {mode} {total} {sum(store.values())}", flush=True)
            return result

    pretrain.Trainer = CyclingTrainer
    training.report_memory = lambda *args, **kwargs: None
    pretrain.main()


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, default=8, help="timed batches")
    parser.add_argument("--ranks", type=int, default=4, help="CPU ranks; the demo has 4")
    args = parser.parse_args()
    steps = len(MODES) * (args.batches + 1)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "corpus")
        build_corpus = str(ROOT / "examples" / "cpu" / "build_corpus.py")
        subprocess.run([sys.executable, build_corpus, "--output", prefix], check=True)
        flags = [*MODEL, "--train-data-path", prefix, "--train-iters", str(steps)]
        done = subprocess.run(
            [sys.executable, *launcher, __file__, "--worker", *flags],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    mark = "elapsed time per iteration (ms): "
    lines = done.stdout.splitlines()
    times_ms = [float(line.split(mark)[1].split()[0]) for line in lines if mark in line]
    if done.returncode or len(times_ms) != steps:
        raise SystemExit(f"run failed:\n{done.stdout[-4000:]}")
    held = [line.split("held rank ")[1].split() for line in lines if "held rank " in line]
    print(f"{'':<20} {'held, fullest rank':>20} {'of it outputs, LSE':>20} {'step':>12}")
    for mode, name in enumerate(MODES):
        total, store = (
            max(int(words[place]) for words in held if words[2] == str(mode)) for place in (3, 4)
        )
        step_ms = median(times_ms[len(MODES) + mode :: len(MODES)])
        print(f"{name:<20} {total / 1e6:>17.3f} MB {store / 1e6:>17.3f} MB {step_ms:>9.1f} ms")
    return 0


if __name__ == "__main__":
    if "--worker" in sys.argv:
        sys.argv.remove("--worker")
        worker()
    else:
        raise SystemExit(main())
