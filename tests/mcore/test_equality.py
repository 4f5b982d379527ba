"""The same batches on one rank and on four, through Megatron's own loop: same losses and gradients.

Case E1 (four placements), D1, D4 and L2 of docs/cases.md. All runs start from one checkpoint.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_nsp.cost.node_cost import ulysses_sent_bytes
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from tests.data_maker import write_documents
from tests.mcore.launch import MOE, Run, shared_checkpoint, train
from tests.mcore.plans import EVERY_KIND, batches, record

BATCH_TOKENS = 700
TREE = SPTree(4, (1, 2, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A dataset with lengths from one token to the longest allowed, and the recorded plans."""
    folder = tmp_path_factory.mktemp("equality")
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(3.5, 1.4, 300), 1, 512).astype(int)
    lengths[:20] = [1, 2, 3, 1, 512, 1, 7, 1, 300, 400, 1, 2, 3, 1, 510, 511, 512, 1, 1, 64]
    write_documents(folder / "docs", lengths.tolist(), seed=2)
    record(folder / "plans.jsonl", TREE, batches(folder / "docs", 20, BATCH_TOKENS))
    return folder


def run(folder: Path, name: str, num_ranks: int, steps: int, *args: str) -> Run:
    """A run from the shared data; on four ranks with the recorded plans."""
    flags = ["--data-path", str(folder / "docs"), "--train-iters", str(steps)]
    flags += ["--nsp-batch-tokens", str(BATCH_TOKENS), "--lr-decay-iters", "20"]
    if num_ranks > 1:
        flags += ["--nsp-policy", f"file:{folder / 'plans.jsonl'}"]
    return train(num_ranks, folder / name, *flags, *args)


def assert_same(one: Run, other: Run, steps: int, tolerance: float, loss_tolerance: float) -> None:
    """Losses and every parameter's gradient, each step, relative to the gradient's norm."""
    assert len(one.losses) == len(other.losses) == steps
    np.testing.assert_allclose(other.losses, one.losses, rtol=loss_tolerance)
    for step in range(steps):
        expected, got = one.grads(step), other.grads(step)
        assert expected and expected.keys() == got.keys()
        for name, grad in expected.items():
            scale = max(float(grad.norm()), 1e-12)
            error = float((got[name] - grad).norm()) / scale
            assert error <= tolerance, (step, EVERY_KIND[step % 5].__name__, name, error)


@pytest.fixture(scope="module")
def dense(folder: Path) -> dict[str, Run]:
    """The dense model in float32: one rank, four ranks, four ranks with a sharded optimizer."""
    start = shared_checkpoint(folder / "dense", folder / "docs")
    return {
        "one rank": run(folder, "dense-1", 1, 20, *start),
        "four ranks": run(folder, "dense-4", 4, 20, *start),
        "distributed optimizer": run(
            folder, "dense-4d", 4, 20, *start, "--use-distributed-optimizer"
        ),
    }


def test_e1_dense_float32_twenty_steps(dense: dict[str, Run]) -> None:
    assert_same(dense["one rank"], dense["four ranks"], 20, 1e-5, 1e-5)


def test_dense_with_the_distributed_optimizer(dense: dict[str, Run]) -> None:
    held = dense["distributed optimizer"].steps[0][0]["grads"].values()
    assert any(grad.isnan().any() for grad in held)  # a rank alone does not have them all
    assert_same(dense["one rank"], dense["distributed optimizer"], 20, 1e-5, 1e-5)


def test_l2_every_rank_has_the_same_parameters_in_the_same_order(dense: dict[str, Run]) -> None:
    (expected,) = (rank[0]["parameters"] for rank in dense["one rank"].steps)
    assert expected
    for name in ("four ranks", "distributed optimizer"):
        assert all(rank[0]["parameters"] == expected for rank in dense[name].steps)


def test_d4_every_target_once_with_its_own_loss(dense: dict[str, Run], folder: Path) -> None:
    lengths = batches(folder / "docs", 20, BATCH_TOKENS)
    for step in range(20):
        expected = dense["one rank"].token_losses(step)
        got = dense["four ranks"].token_losses(step)
        targets = {
            (document, position)
            for document, length in zip(
                lengths[step].documents.tolist(), lengths[step].lengths.tolist(), strict=True
            )
            for position in range(length - 1)  # the last token of a document has no target
        }
        assert expected.keys() == got.keys() == targets
        worst = max(abs(got[key] - expected[key]) for key in targets)
        assert worst < 1e-4, (step, worst)


def test_collectives_and_bytes_are_the_closed_form(dense: dict[str, Run], folder: Path) -> None:
    num_layers, shape = 2, ModelShape.from_hidden(2, 64, 8, 2, 8, bytes_per_element=4)
    lines = (folder / "plans.jsonl").read_text().splitlines()
    for step, plan in enumerate(Plan.from_json(line) for line in lines):
        for rank in range(4):
            wide = [part for part in rank_layout(plan, rank).slices if part.degree > 1]
            records = dense["four ranks"].steps[rank][step]["records"]
            assert len(records) == num_layers * 4 * len(wide)
            assert sum(record.sent_bytes for record in records) == num_layers * sum(
                ulysses_sent_bytes(
                    pass_, phase, part.num_tokens, part.stream_tokens, part.degree, shape
                )
                for part in wide
                for pass_ in Pass
                for phase in Phase
            )
        if step % 5 == 0:
            assert not any(rank[step]["records"] for rank in dense["four ranks"].steps)


@pytest.fixture(scope="module", params=["dense", "moe"])
def exact(folder: Path, request: pytest.FixtureRequest) -> tuple[Run, Run]:
    """A model in float64 on one rank and on four, a step for every kind of plan."""
    name, is_moe = f"exact-{request.param}", request.param == "moe"
    model = [*(MOE if is_moe else []), "--probe-float64", "--probe-layer-inputs"]
    model += shared_checkpoint(folder / name, folder / "docs", *model)
    split = ["--expert-model-parallel-size", "2"] if is_moe else []
    one, four = (
        run(folder, f"{name}-{ranks}", ranks, len(EVERY_KIND), *model, *more)
        for ranks, more in ((1, []), (4, split))
    )
    return one, four


def test_float64(exact: tuple[Run, Run]) -> None:
    assert next(iter(exact[0].grads(0).values())).dtype == torch.float64
    assert_same(*exact, len(EVERY_KIND), 1e-9, 1e-12)


def test_l2_each_token_sends_the_same_gradient_into_every_layer(exact: tuple[Run, Run]) -> None:
    one, four = exact
    for step in range(len(EVERY_KIND)):
        expected, got = one.layer_input_grads(step), four.layer_input_grads(step)
        assert expected.keys() == got.keys() and {layer for layer, _, _ in expected} == {1, 2}
        for place, grad in expected.items():
            assert float((got[place] - grad).norm()) <= 1e-9 * float(grad.norm()), (step, place)


def test_moe_with_expert_parallel_two(folder: Path) -> None:
    """In float64: twenty updates let float32 drift by what the vector units of a machine round."""
    model = [*MOE, "--probe-float64"]
    model += shared_checkpoint(folder / "moe", folder / "docs", *model)
    one = run(folder, "moe-1", 1, 20, *model)
    four = run(folder, "moe-4", 4, 20, *model, "--expert-model-parallel-size", "2")
    assert any("local_experts.3" in name for name in four.grads(0))
    assert_same(one, four, 20, 1e-9, 1e-9)
