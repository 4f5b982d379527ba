"""What nesting costs when nothing is nested: an all-leaf run against the same loop without a plan.

    python benchmarks/overhead.py [--steps 20] [--repeats 5] [--ranks 4]

One training run alternates two kinds of step on the same
batches with the same assignment of documents to ranks. A nested step is the product: planner,
digest, layout, schedule, executor. A plain step gets its rows from memory and calls the same CPU
kernel in a plain autograd function: no plan, no groups, no executor. Steps of both kinds alternate,
so both see the same machine. Prints one line a repeat and the median ratio; exits 1 above the
target of 1.05.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = 1.05
# The demo's model and batch (examples/cpu/train.sh).
MODEL = (  # noqa: SIM905 - reads as the command line it is
    "--nsp-cpu --num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --num-attention-heads 4 --kv-channels 16 "
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--hidden-dropout 0 --seq-length 4096 --max-position-embeddings 4096 "
    "--calculate-per-token-loss --tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-3 "
    "--log-interval 1 --nsp-batch-tokens 10240 --nsp-policy leaves"
).split()


def worker() -> None:
    """One rank of the training run; prints nothing but Megatron's log."""
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode()
    import torch
    from megatron.training import training

    from megatron_nsp.mcore import pretrain, spec
    from megatron_nsp.mcore.data import MicroBatch
    from megatron_nsp.mcore.packed_seq_params import NestedSeqParams
    from megatron_nsp.runtime.kernels import AttentionState, SampleBounds, VarlenCall
    from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel

    kernel = CpuFlashKernel()

    class PlainAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, samples: Any, mask: Any) -> Any:
            q, k, v = (x.contiguous() for x in (q, k, v))
            ctx.call = VarlenCall(samples, mask)
            out, lse = kernel.forward(q, k, v, ctx.call)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            state = AttentionState(*ctx.saved_tensors)
            return (*kernel.backward(dout.contiguous(), state, ctx.call), None, None)

    @dataclass
    class PlainSeqParams(NestedSeqParams):
        samples: SampleBounds | None = None

    nested_forward = spec.NestedCoreAttention.forward

    def core_attention(self: Any, query: Any, key: Any, value: Any, *args: Any, **kw: Any) -> Any:
        params = kw["packed_seq_params"]
        if not isinstance(params, PlainSeqParams):
            return nested_forward(self, query, key, value, *args, **kw)
        qkv = (x.squeeze(1) for x in (query, key, value))
        return PlainAttention.apply(*qkv, params.samples, self.mask).flatten(1).unsqueeze(1)

    spec.NestedCoreAttention.forward = core_attention

    class AlternatingTrainer(pretrain.Trainer):
        """Every second step repeats the nested step before it, without plan or executor."""

        nested: MicroBatch | None = None
        samples: SampleBounds | None = None

        def forward_step(self, data_iterator: Any, model: Any) -> Any:
            if self.nested is None:
                self.nested = next(data_iterator)
                (part,) = self.nested.nested.layout.slices
                self.samples = SampleBounds(part.cu_seqlens)
                batch = self.nested
                params = NestedSeqParams.of(batch.nested, self.runtime, batch.positions)
            else:
                batch, self.nested = self.nested, None
                params = PlainSeqParams(
                    qkv_format="sbhd", positions=batch.positions, samples=self.samples
                )
            losses = model(
                batch.tokens,
                batch.positions.unsqueeze(0),
                None,
                labels=batch.labels,
                packed_seq_params=params,
            )
            loss = pretrain.partial(
                pretrain.per_token_loss, loss_mask=batch.loss_mask, step_has_targets=True
            )
            return losses, loss

    pretrain.Trainer = AlternatingTrainer
    training.report_memory = lambda *args, **kwargs: None
    pretrain.main()


def measure(num_ranks: int, steps: int, prefix: str) -> float:
    """Runs `steps` pairs after three warm-up pairs; returns the ratio of the median step times."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    flags = [*MODEL, "--train-data-path", prefix, "--train-iters", str(2 * (steps + 3))]
    done = subprocess.run(
        [sys.executable, *launcher, str(num_ranks), __file__, "--worker", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    mark = "elapsed time per iteration (ms): "
    lines = [line for line in done.stdout.splitlines() if mark in line]
    times_ms = [float(line.split(mark)[1].split()[0]) for line in lines]
    if done.returncode or len(times_ms) != 2 * (steps + 3):
        raise SystemExit(f"run failed:\n{done.stdout[-4000:]}")
    nested_ms, plain_ms = median(times_ms[6::2]), median(times_ms[7::2])
    ratio = nested_ms / plain_ms
    print(f"nested {nested_ms:8.1f} ms  plain {plain_ms:8.1f} ms  ratio {ratio:.3f}", flush=True)
    return ratio


def main() -> int:
    """Prints the measurement; 0 when the median ratio is within the target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps in a repeat")
    parser.add_argument("--ranks", type=int, default=4, help="CPU ranks; the demo has 4")
    parser.add_argument("--repeats", type=int, default=5, help="runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        build_corpus = str(ROOT / "examples" / "cpu" / "build_corpus.py")
        subprocess.run([sys.executable, build_corpus, "--output", str(prefix)], check=True)
        ratios = [measure(args.ranks, args.steps, str(prefix)) for _ in range(args.repeats)]
    print(f"all-leaf nested over plain: median {median(ratios):.3f}, target {TARGET}")
    return 0 if median(ratios) <= TARGET else 1


if __name__ == "__main__":
    if "--worker" in sys.argv:
        sys.argv.remove("--worker")
        worker()
    else:
        raise SystemExit(main())
