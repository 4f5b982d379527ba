"""Multi-token prediction in Megatron's own loop: one rank against every placement and layout.

Case E4 of docs/cases.md. `test_reference.py` holds one rank against losses that are worked out from
their definition. Among the documents are those that have no target further on.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_nsp.mcore.data_paths import DataPath
from megatron_nsp.mcore.documents import IndexedDocuments
from megatron_nsp.mcore.further_tokens import further_tokens
from megatron_nsp.mcore.readers import TokenRows, read_tokens
from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from tests.data_maker import write_documents
from tests.mcore.launch import MOE, Run, shared_checkpoint, train
from tests.mcore.plans import EVERY_KIND, batches, record
from tests.mcore.test_equality import assert_same
from tests.mcore.test_heads_and_masks import grad_norms
from tests.mcore.test_reference import assert_equals_plain, plain

LENGTHS = [130, 77, 64, 31, 8, 3, 1, 2, 55, 4, 1, 90]
STEPS = len(EVERY_KIND)
TREE = SPTree(4, (1, 2, 4))
WHOLE = ["--recompute-granularity", "full", "--nsp-save-budget-gb", "inf", "--recompute-method"]
UNIFORM = [*WHOLE, "uniform", "--recompute-num-layers", "1"]
BLOCK = [*WHOLE, "block", "--recompute-num-layers", "2"]
ROW_BYTES = 8 * 8 * 8
"""Of the output of one token's attention in double precision: 8 heads of 8 elements."""


def targets(depth: int) -> int:
    """Targets of a step at a depth."""
    return sum(max(0, length - 1 - depth) for length in LENGTHS)


class Model:
    """A model with its data, checkpoint and run on one rank."""

    def __init__(self, folder: Path, depths: int, *args: str) -> None:
        folder.mkdir()
        self.folder, self.depths = folder, depths
        write_documents(folder / "docs", LENGTHS, seed=3)
        drawn = batches(folder / "docs", STEPS, sum(LENGTHS))
        record(folder / "plans", TREE, drawn)
        self.args = [*args, "--mtp-num-layers", str(depths), "--probe-float64"]
        self.args += ["--init-method-std", "0.2", "--mtp-loss-scaling-factor", "0.3"]
        self.args += shared_checkpoint(folder, folder / "docs", *self.args)
        self.one = self.run("one", 1)

    def run(self, name: str, num_ranks: int, *args: str) -> Run:
        """A run over all documents in each step."""
        data = ["--data-path", str(self.folder / "docs"), "--nsp-batch-tokens", str(sum(LENGTHS))]
        data += ["--train-iters", str(STEPS)]
        return train(num_ranks, self.folder / name, *self.args, *data, *args)

    @property
    def placed(self) -> list[str]:
        """The flag for a step of every kind of placement on four ranks."""
        return ["--nsp-policy", f"file:{self.folder / 'plans'}"]

    def assert_equals_one_rank(self, run: Run) -> None:
        """Main and further losses, predictions that were right, every gradient and their norm."""
        assert_same(self.one, run, STEPS, 1e-9, 1e-9)
        assert len(grad_norms(run)) == STEPS and grad_norms(run) == grad_norms(self.one)
        assert np.shape(run.mtp_losses) == (STEPS, self.depths)
        np.testing.assert_allclose(run.mtp_losses, self.one.mtp_losses, rtol=1e-9)
        for step in range(STEPS):
            one, other = self.one.steps[-1][step], run.steps[-1][step]
            assert other["mtp_correct"] == one["mtp_correct"]
            expected = [(step + 1) * targets(depth) for depth in range(1, self.depths + 1)]
            assert other["mtp_total"] == one["mtp_total"] == expected


@pytest.fixture(scope="module")
def two_deep(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Two depths, each with a layer of its own; the output layer is not the embedding."""
    folder = tmp_path_factory.mktemp("mtp") / "two-deep"
    return Model(folder, 2, "--untie-embeddings-and-output-weights")


def test_e4_every_placement_with_a_fixed_input_layout(two_deep: Model) -> None:
    losses = two_deep.one.mtp_losses
    assert len({round(loss, 9) for step in losses for loss in step}) == 2 * STEPS
    assert any("mtp.layers.1" in name for name in two_deep.one.grads(0))
    two_deep.assert_equals_one_rank(two_deep.run("placed", 4, *two_deep.placed))
    static = two_deep.run("static", 4, *two_deep.placed, "--nsp-input-layout", "static:2")
    two_deep.assert_equals_one_rank(static)


def test_pipeline_stages_with_several_micro_batches_in_flight(two_deep: Model) -> None:
    stages = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "8"]
    run = two_deep.run("stages", 4, *stages, *UNIFORM)
    assert "4 micro-batches a step" in run.output
    two_deep.assert_equals_one_rank(run)


def test_tensor_parallel_ranks(two_deep: Model) -> None:
    two_deep.assert_equals_one_rank(
        two_deep.run("tensor", 4, "--tensor-model-parallel-size", "2", "--global-batch-size", "4")
    )


def test_one_layer_at_two_depths_recomputed_from_saved_outputs(tmp_path: Path) -> None:
    model = Model(tmp_path / "repeated", 2, "--mtp-use-repeated-layer")
    run = model.run("placed", 4, *model.placed, *UNIFORM, "--probe-recompute")
    model.assert_equals_one_rank(run)
    for step in range(STEPS):  # the depths save apart from one another and from the model's layers
        saved = sum(out_bytes for rank in run.steps for _, _, out_bytes, _ in rank[step]["saved"])
        assert saved == (2 + 2) * sum(LENGTHS) * ROW_BYTES
    assert not any("mtp.layers.1" in name for name in run.grads(0))


def test_experts_one_deep_recomputed_in_blocks_with_heads_cut_off_the_model(tmp_path: Path) -> None:
    model = Model(tmp_path / "experts", 1, *MOE, "--mtp-detach-heads")
    # Megatron recomputes no depth by blocks: its layer must not take what one of the model saved.
    run = model.run("placed", 4, *model.placed, "--expert-model-parallel-size", "2", *BLOCK)
    model.assert_equals_one_rank(run)
    assert any("mtp_model_layer.mlp.experts" in name for name in run.grads(0))


def test_the_weight_of_further_losses_is_megatrons_where_a_document_is_alone(
    tmp_path: Path,
) -> None:
    lengths = [130]
    write_documents(tmp_path / "docs", lengths, seed=3)
    model = ["--mtp-num-layers", "2", "--init-method-std", "0.2", "--train-iters", "1"]
    start = shared_checkpoint(tmp_path, tmp_path / "docs", *model, "--probe-float64")
    expected = plain(
        tmp_path / "plain.pt",
        tmp_path / "docs",
        *(*model, *start, "--megatrons-mtp-loss"),
        lengths=lengths,
    )
    data = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", str(sum(lengths))]
    run = train(4, tmp_path / "four", *model, "--probe-float64", *data, *start)
    assert_equals_plain(run, 0, expected)


def test_further_tokens_end_with_their_document_and_reach_beyond_the_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_nsp.mcore.further_tokens.on_device", torch.from_numpy)
    write_documents(tmp_path / "docs", [5, 2], seed=3)
    documents = IndexedDocuments(DataPath("--data-path", (f"{tmp_path}/docs",)))
    a, b = documents.read(0, 0, 5).tolist(), documents.read(1, 0, 2).tolist()
    tree = SPTree(2, (1, 2))
    plan = Plan.from_nodes(tree, [5, 2], [tree.node(2, 0)] * 2)

    def seen(rank: int) -> list[list[list[int]]]:
        layout = rank_layout(plan, rank, row_multiple=4)
        columns = read_tokens(layout, np.arange(2), plan.lengths, documents, 2)
        tokens, labels, loss_mask, *further = map(torch.from_numpy, columns)
        rows = TokenRows(tokens, labels, loss_mask, tuple(further))
        return [
            [row[0].tolist() for row in (own.tokens, own.positions, own.labels, own.loss_mask)]
            for own in further_tokens(rows, layout, plan.lengths)
        ]

    # a0 a1 a2 and a filler row on rank 0; a3 a4 b0 b1 on rank 1
    assert seen(0) == [
        [[a[1], a[2], a[3], 0], [1, 2, 3, 0], [a[2], a[3], a[4], 0], [1, 1, 1, 0]],
        [[a[2], a[3], a[4], 0], [2, 3, 4, 0], [a[3], a[4], 0, 0], [1, 1, 0, 0]],
    ]
    assert seen(1) == [
        [[a[4], 0, b[1], 0], [4, 0, 1, 0], [0] * 4, [0] * 4],
        [[0] * 4] * 4,
    ]
