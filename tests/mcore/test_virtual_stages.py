"""Pipelines of every shape train as one rank: virtual, uneven and empty stages, in Megatron's loop.

Two ranks of a domain by two of a pipeline, in double precision, a step for every kind of placement
with its samples dealt to the micro-batches. The embedding is tied to the output layer, which is on
another rank. Case J1 of docs/cases.md.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_nsp.cost.memory import micro_batches_in_flight
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import SavedSizes, mark_saved, saved_bytes
from megatron_nsp.plan.tree import Node, SPTree
from tests.data_maker import write_documents
from tests.mcore.launch import Run, shared_checkpoint, train
from tests.mcore.plans import batches, filler, leaves, mixed, planned, root
from tests.mcore.test_equality import assert_same
from tests.mcore.test_recompute import FULL, SELECTIVE
from tests.mcore.test_run import LENGTHS

KINDS = leaves, root, mixed, planned, filler
TREE = SPTree(2, (1, 2))
MODEL = ["--num-layers", "6", "--probe-float64"]
ROW_BYTES, LSE_BYTES = 8 * 8 * 8, 8
"""Of one token of the tests' model in float64: 8 heads of 8 elements."""


def write_plans(folder: Path, num_micro_batches: int) -> tuple[list[Plan], list[str]]:
    """Records a plan for each kind; returns them and the flags that replay them."""
    rng, plans = random.Random(3), []
    drawn = batches(folder / "docs", len(KINDS), 300)
    for kind, batch in zip(KINDS, drawn, strict=True):
        own = kind(TREE, batch.lengths, rng)
        nodes = [Node(int(d), int(i)) for d, i in zip(own.depth, own.index, strict=True)]
        where = [rng.randrange(num_micro_batches) for _ in nodes]
        plans.append(Plan.from_nodes(TREE, batch.lengths, nodes, where, num_micro_batches))
    path = folder / f"plans-{num_micro_batches}.jsonl"
    path.write_text("".join(plan.to_json() + "\n" for plan in plans))
    flags = ["--nsp-policy", f"file:{path}", "--global-batch-size", str(2 * num_micro_batches)]
    return plans, [*flags, "--pipeline-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents to train and to evaluate on."""
    folder = tmp_path_factory.mktemp("stages")
    write_documents(folder / "docs", LENGTHS, seed=3)
    write_documents(folder / "valid", [140, 1, 77, 50, 32], seed=4)
    return folder


@pytest.fixture(scope="module")
def flags(folder: Path) -> list[str]:
    """Five steps from one checkpoint, with an evaluation after every second one."""
    start = shared_checkpoint(folder, folder / "docs", *MODEL)
    data = ["--train-data-path", str(folder / "docs"), "--valid-data-path", str(folder / "valid")]
    steps = ["--train-iters", "5", "--nsp-batch-tokens", "300"]
    return [*MODEL, *start, *data, *steps, "--eval-iters", "1", "--eval-interval", "2"]


@pytest.fixture(scope="module")
def one(folder: Path, flags: list[str]) -> Run:
    """One rank, a step in one micro-batch."""
    return train(1, folder / "one", *flags)


def validation_losses(run: Run) -> list[float]:
    """The losses that evaluations reported."""
    lines = [line for line in run.output.splitlines() if "validation loss at iteration" in line]
    return [float(line.split("lm loss value:")[1].split()[0]) for line in lines]


def assert_trains_as(one: Run, run: Run) -> None:
    """Losses, gradients and evaluations; and each step was planned once."""
    assert_same(one, run, len(KINDS), 1e-9, 1e-9)
    assert validation_losses(run) and len(one.losses) == run.output.count("nsp step ")
    np.testing.assert_allclose(validation_losses(run), validation_losses(one), rtol=1e-6)


OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.mark.parametrize(
    ("num_micro_batches", "stages"),
    [
        # Embedding and loss count as layers: chunks of 1, 2, 2 and 1.
        (
            8,
            "--num-virtual-stages-per-pipeline-rank 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
        ),
        (
            6,
            "--num-virtual-stages-per-pipeline-rank 3 --overlap-p2p-communication-warmup-flush "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
        ),
        (3, "--decoder-first-pipeline-num-layers 2"),
        (2, "--pipeline-model-parallel-layout Etttttt|L"),
    ],
)
def test_stages_train_as_one_rank(
    folder: Path, flags: list[str], one: Run, num_micro_batches: int, stages: str
) -> None:
    _, replay = write_plans(folder, num_micro_batches)
    more = [*stages.split(), *(OVERLAP if num_micro_batches == 8 else [])]
    run = train(4, folder / str(num_micro_batches), *flags, *replay, *more)
    assert_trains_as(one, run)


def test_a_run_of_virtual_stages_resumes(folder: Path, flags: list[str], one: Run) -> None:
    _, replay = write_plans(folder, 4)
    more = [*replay, "--num-layers-per-virtual-pipeline-stage", "1"]
    checkpoint = str(folder / "virtual")
    save = ["--save", checkpoint, "--save-interval", "3"]
    whole = train(4, folder / "whole", *flags, *more, *save)
    assert_trains_as(one, whole)
    load = ["--load", checkpoint, "--ckpt-step", "3"]
    start = flags.index("--load")
    later = [*flags[:start], *flags[start + 5 :]]  # without the weights that all begin with
    second = train(4, folder / "second", *later, *more, *load)
    assert second.losses == whole.losses[3:]
    assert validation_losses(second) == validation_losses(whole)[1:]


def evaluates_before(step: int) -> bool:
    """Whether what is written down of a step has an evaluation in it."""
    return step > 0 and step % 2 == 0


def in_flight(rank: int, chunks: int, group: int, num_micro_batches: int) -> list[list[tuple]]:
    """The (micro-batch, chunk) that a rank of two holds after each forward, by Megatron's table."""
    table = get_schedule_table(num_micro_batches, chunks, group)
    pipeline = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    communicator = SimpleNamespace(pp_group=pipeline, virtual_pipeline_model_parallel_size=chunks)
    total, _, warmup, _ = get_pp_rank_microbatches(
        num_micro_batches, chunks, group, p2p_communicator=communicator
    )
    backwards = [(micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    return [
        [each for each in table[: done + 1] if each not in backwards[: max(0, done - warmup)]]
        for done in range(total)
    ]


@pytest.mark.parametrize(
    ("num_micro_batches", "group", "layout", "sizes", "how", "budget_bytes"),
    [
        (5, 3, "E|ttt|t|ttL", ((0, 1), (3, 2)), FULL, 120_000.0),
        (4, 2, "Et|tt||tttL", ((1, 0), (2, 3)), SELECTIVE, 40_000.0),
    ],
)
def test_layouts_save_for_every_micro_batch_in_flight(
    folder: Path,
    flags: list[str],
    one: Run,
    num_micro_batches: int,
    group: int,
    layout: str,
    sizes: Sequence[Sequence[int]],
    how: list[str],
    budget_bytes: float,
) -> None:
    """An embedding on a stage of its own, and a stage of nothing, with what layers save."""
    plans, replay = write_plans(folder, num_micro_batches)
    stages = ["--pipeline-model-parallel-layout", layout, *how, "--probe-recompute"]
    stages += ["--microbatch-group-size-per-virtual-pipeline-stage", str(group)]
    stages += ["--nsp-save-budget-gb", repr(budget_bytes / 1e9)]
    run = train(4, folder / f"group-{group}", *flags, *replay, *stages)
    assert_trains_as(one, run)
    rows = how is FULL
    layer = SavedSizes(8, rows * ROW_BYTES, LSE_BYTES, num_layers=1)
    for step, plan in enumerate(plans):
        saved = mark_saved(plan, replace(layer, num_layers=5), budget_bytes)
        assert saved.num_saved
        for place, steps in enumerate(run.steps):
            domain_rank, rank = place % 2, place // 2
            own_bytes = [
                [
                    int(saved_bytes(plan, saved, layer, m)[domain_rank]) * size
                    for size in sizes[rank]
                ]
                for m in range(num_micro_batches)
            ]
            held = in_flight(rank, 2, group, num_micro_batches)
            found = [
                (output * rows + lse, live)
                for (has_backward, _, output, lse), live in zip(
                    steps[step]["saved"], steps[step]["live_bytes"], strict=True
                )
                if has_backward
            ]
            assert [own for own, _ in found] == [
                own_bytes[m][chunk] for m, chunk in get_schedule_table(num_micro_batches, 2, group)
            ]
            if not evaluates_before(step):
                of_layer = sum(
                    1 + (saved.of_node(m, node) < len(plan.samples_of(node, m)))
                    for m in range(num_micro_batches)
                    for node in plan.active_path(domain_rank, m)
                )
                assert steps[step]["kernel_calls"].count("fwd") == of_layer * sum(sizes[rank])
            if rows:
                assert [live for _, live in found] == [
                    sum(own_bytes[m][chunk] for m, chunk in passes) for passes in held
                ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("group", [2, 3, 4])
def test_passes_in_flight_are_those_of_megatrons_schedule(
    rank: int, chunks: int, group: int
) -> None:
    most = max(len(held) for held in in_flight(rank, chunks, group, 12))
    own = micro_batches_in_flight(2, chunks, group)
    assert most <= own * chunks and (rank or most == pytest.approx(own * chunks))


def test_four_stages_without_overlap(folder: Path, flags: list[str], one: Run) -> None:
    stages = ["--pipeline-model-parallel-size", "4", "--no-overlap-p2p-communication"]
    stages += ["--pipeline-model-parallel-layout", "E|t|t|t|t|t|t|L", "--global-batch-size", "8"]
    stages += ["--nsp-token-budget", "200"]
    run = train(4, folder / "four", *flags, *stages)
    assert_trains_as(one, run)
