"""FP8 and FP4: rows in whole blocks, filled up with zeros; in double precision, on CPU ranks.

Case J4 of docs/cases.md. CPU ranks run no FP8: what linear layers make of these rows is Transformer
Engine's business and has been run on no GPU.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_nsp.mcore.job import row_multiple
from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from tests.mcore.launch import Run
from tests.mcore.test_mtp import STEPS, Model

TREE = SPTree(4, (1, 2, 4))


def rows_of_pairs(**formats: object) -> int:
    """What buffers are filled to in a job of tensor-parallel pairs."""
    args = {"fp8": None, "fp8_recipe": "delayed", "fp4": None, "fp4_recipe": "nvfp4"}
    args |= {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    return row_multiple(SimpleNamespace(**args | formats))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formats", "rows"),
    [
        ({}, 1),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": "e2m1"}, 128),
    ],
)
def test_j4_rows_of_a_rank_are_whole_blocks(formats: dict[str, object], rows: int) -> None:
    assert rows_of_pairs(**formats) == rows
    assert rows_of_pairs(**formats, sequence_parallel=True) == 2 * rows
    plan = Plan.from_nodes(TREE, [37, 11], [TREE.node(4, 0), TREE.node(1, 2)])
    for rank in range(4):
        layout = rank_layout(plan, rank, row_multiple=rows_of_pairs(**formats))
        assert layout.buffer_tokens % rows == 0
        assert layout.buffer_tokens - layout.num_tokens < rows


def assert_fillers_are_zeros(run: Run, rows: int) -> None:
    """In the input of every layer of every rank."""
    entries = [entry for rank in run.steps for step in rank for entry in step["fillers"]]
    assert all(num_rows % rows == 0 for num_rows, _ in entries)
    largest = [largest for _, of_rows in entries for largest in of_rows]
    assert largest and set(largest) == {0.0}


def test_j4_filler_rows_are_zeros_and_change_nothing(tmp_path: Path) -> None:
    model = Model(tmp_path / "model", 1)  # the last layer embeds tokens of its own
    blocks = ["--probe-blocks", "16"]
    placed = model.run("placed", 4, *model.placed, *blocks, "--nsp-input-layout", "static:2")
    model.assert_equals_one_rank(placed)
    assert_fillers_are_zeros(placed, 16)
    assert len(placed.steps[0][0]["fillers"]) == 3 and len(placed.steps[0]) == STEPS
    tensor = model.run("tensor", 4, "--tensor-model-parallel-size", "2", *blocks)
    model.assert_equals_one_rank(tensor)
    assert_fillers_are_zeros(tensor, 16)
