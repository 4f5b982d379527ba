"""Windows, sinks and latent attention in Megatron's own loop: one rank against many.

Case B3 of docs/cases.md. `test_reference.py` holds the same against Megatron alone, on one step.
"""

import re
from pathlib import Path

import pytest

from megatron_nsp.plan.plan import Plan
from tests.data_maker import write_documents
from tests.mcore.launch import LATENT, Run, shared_checkpoint, train
from tests.mcore.plans import batches, each_degree, mixed, record, root
from tests.mcore.test_cases import TREE
from tests.mcore.test_equality import assert_same

LENGTHS = [130, 77, 64, 31, 8, 3, 1, 2, 55]
SINKS = ["--softmax-type", "learnable"]
WINDOWS = ["--window-size", "20,0", "--window-attn-skip-freq", "2"]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def sinks_of(run: Run, step: int) -> list[float]:
    """The norm of each layer's gradient of the sinks."""
    grads = run.grads(step).items()
    return [float(grad.norm()) for name, grad in grads if name.endswith("softmax_offset")]


def grad_norms(run: Run) -> list[str]:
    """What Megatron prints, rounded as it prints it."""
    return re.findall(r"grad norm: (\S+)", run.output)


def prepared(folder: Path, steps: int) -> tuple[list[str], list[str]]:
    """Flags of a run over LENGTHS, and those that replay plans of every kind on four ranks."""
    write_documents(folder / "docs", LENGTHS, seed=3)
    drawn = batches(folder / "docs", steps, sum(LENGTHS))
    record(folder / "plans", TREE, drawn, (each_degree, mixed, root))
    flags = ["--data-path", str(folder / "docs"), "--nsp-batch-tokens", str(sum(LENGTHS))]
    flags += ["--train-iters", str(steps), "--init-method-std", "0.2"]
    return flags, ["--nsp-policy", f"file:{folder / 'plans'}"]


def test_b3_windows_at_every_degree_of_one_micro_batch(tmp_path: Path) -> None:
    lengths, degrees = [1000, 129, 128, 127, 1], [4, 2, 2, 1, 1]
    write_documents(tmp_path / "docs", lengths, seed=3)
    (batch,) = batches(tmp_path / "docs", 1, sum(lengths), 1024)
    degree_of = dict(zip(lengths, degrees, strict=True))
    nodes = [TREE.node(degree_of[length], 0) for length in batch.lengths.tolist()]
    plan = Plan.from_nodes(TREE, batch.lengths, nodes)
    (tmp_path / "plans").write_text(plan.to_json() + "\n")
    flags = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", str(sum(lengths))]
    flags += ["--seq-length", "1024", "--max-position-embeddings", "1024", "--train-iters", "1"]
    flags += ["--window-size", "127,0", "--window-attn-skip-freq", "2", "--probe-float64"]
    one = train(1, tmp_path / "1", *flags)
    four = train(4, tmp_path / "4", *flags, "--nsp-policy", f"file:{tmp_path / 'plans'}")
    assert_same(one, four, 1, 1e-9, 1e-9)


def test_windows_and_sinks_in_float32_recomputed_with_a_sharded_optimizer(tmp_path: Path) -> None:
    flags, policy = prepared(tmp_path, 6)
    flags += [*SINKS, *WINDOWS]
    one = train(1, tmp_path / "1", *flags)
    four = train(
        4, tmp_path / "4", *flags, *policy, *RECOMPUTE.split(), "--use-distributed-optimizer"
    )
    assert_same(one, four, 6, 1e-5, 1e-5)
    assert all(norm > 1e-3 for step in range(6) for norm in sinks_of(four, step))
    assert len(sinks_of(four, 0)) == 2


def test_sinks_over_tensor_parallel_ranks_and_through_checkpoints(tmp_path: Path) -> None:
    flags, policy = prepared(tmp_path, 3)
    flags += [*SINKS, "--probe-float64"]
    start = shared_checkpoint(tmp_path, tmp_path / "docs", *SINKS, "--probe-float64")
    split = [*policy, "--tensor-model-parallel-size", "2"]
    saved = str(tmp_path / "trained")
    one = train(1, tmp_path / "1", *flags, *start)
    save = ["--save", saved, "--save-interval", "3"]
    eight = train(8, tmp_path / "8", *flags, *start, *split, *save)
    assert_same(one, eight, 3, 1e-9, 1e-9)
    assert grad_norms(one) == grad_norms(eight) and len(grad_norms(one)) == 3
    load = ["--load", saved, "--finetune", "--no-load-optim", "--no-load-rng", "--lr", "0"]
    runs = [
        train(ranks, tmp_path / f"loaded-{ranks}", *flags, *load, *more)
        for ranks, more in ((1, []), (8, split))
    ]
    assert_same(*runs, 3, 1e-9, 1e-9)
    assert runs[0].losses[0] != one.losses[0]


def test_layers_of_later_pipeline_stages_have_the_windows_of_their_number(tmp_path: Path) -> None:
    flags, _ = prepared(tmp_path, 2)
    flags += [*SINKS, *WINDOWS, "--probe-float64"]
    flags += shared_checkpoint(tmp_path, tmp_path / "docs", *SINKS, "--probe-float64")
    one = train(1, tmp_path / "1", *flags)
    four = train(4, tmp_path / "4", *flags, "--pipeline-model-parallel-size", "2")
    assert_same(one, four, 2, 1e-9, 1e-9)


@pytest.mark.parametrize(
    "recompute",
    [RECOMPUTE, "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"],
    ids=["full recomputation", "selective recomputation"],
)
def test_latent_attention(tmp_path: Path, recompute: str) -> None:
    flags, policy = prepared(tmp_path, 3)
    flags += [*LATENT, "yarn", "--rotary-scaling-factor", "4", "--probe-float64"]
    one = train(1, tmp_path / "1", *flags)
    four = train(4, tmp_path / "4", *flags, *policy, *recompute.split())
    assert_same(one, four, 3, 1e-9, 1e-9)
    assert any(rank[0]["records"] for rank in four.steps)
