"""What runs together trains as one rank: settings in pairs, in double precision where it can be.

Every two values of different factors that can meet do so in at least two cells. `make test` runs
the first dozen, those in which most pairs meet; `make matrix` runs all.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.data_maker import write_documents
from tests.mcore.launch import MOE, Run, shared_checkpoint, train
from tests.mcore.test_equality import assert_same
from tests.mcore.test_run import LENGTHS

STEPS, IN_EVERY_RUN = 3, 12
LAYERS = ["--num-layers", "4"]
SPLIT_ROWS = (  # noqa: SIM905 - experts are split over ranks, not each of them
    "--sequence-parallel --spec tests.mcore.split_norms layer_spec --expert-tensor-parallel-size 1"
).split()
RECOMPUTE = "--recompute-granularity {}"
BALANCE = {
    "none": "",
    "by document": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
    "bias": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01",
}
"""Those that do not depend on how a step is divided into micro-batches."""

FACTORS: Mapping[str, Mapping[str, str]] = {
    "model": {"dense": "", "experts": " ".join(MOE)},
    "balancing": BALANCE,
    "experts": {"EP 1": "", "EP 2": "--expert-model-parallel-size 2"},
    "rows": {"TP 1": "", "TP 2": "--tensor-model-parallel-size 2"},
    "stages": {
        "PP 1": "",
        "PP 2": "--pipeline-model-parallel-size 2",
        "PP 2 x 2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    },
    "optimizer": {
        "DDP": "",
        "sharded": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "FSDP": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --use-distributed-optimizer",
    },
    "recompute": {
        "nothing": "",
        "attention": RECOMPUTE.format("selective"),
        "layers": RECOMPUTE.format("full --recompute-method uniform --recompute-num-layers 1"),
    },
    "passes": {"1 pass": "1", "4 passes": "4"},
    "policy": {name: f"--nsp-policy {name}" for name in ("auto", "root", "leaves")},
}
Cell = tuple[str, ...]
Pair = tuple[int, str, int, str]
"""Two settings, each with the place of its factor."""


def can_be(cell: Cell) -> bool:
    """Whether these settings go together."""
    model, balancing, experts, rows, stages, optimizer, _, passes, _ = cell
    return (
        (model == "experts" or (balancing == "none" and experts == "EP 1"))
        and (optimizer != "FSDP" or (stages, rows, model) == ("PP 1", "TP 1", "dense"))
        and (stages != "PP 2 x 2" or passes == "4 passes")
    )


def pairs(cell: Cell) -> set[Pair]:
    """Every two settings of a cell."""
    placed = itertools.combinations(enumerate(cell), 2)
    return {(i, one, j, other) for (i, one), (j, other) in placed}


POSSIBLE = [cell for cell in itertools.product(*FACTORS.values()) if can_be(cell)]
PAIRS = set[Pair]().union(*map(pairs, POSSIBLE))


def cells() -> Iterator[Cell]:
    """Cells until every pair has been in two, the one with most missing pairs next."""
    missing = dict.fromkeys(PAIRS, 2)
    left = list(POSSIBLE)
    while any(missing.values()):
        chosen = max(left, key=lambda cell: sum(missing[pair] for pair in pairs(cell)))
        left.remove(chosen)
        missing |= {pair: max(0, missing[pair] - 1) for pair in pairs(chosen)}
        yield chosen


CELLS = list(cells())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The documents."""
    folder = tmp_path_factory.mktemp("matrix")
    write_documents(folder / "docs", LENGTHS, seed=3)
    yield folder
    for cached in (start, one_rank):
        cached.cache_clear()


def model_flags(cell: Cell) -> list[str]:
    """What decides the model, whatever runs it; Megatron-FSDP knows no double precision."""
    precision = [] if "FSDP" in cell else ["--probe-float64"]
    return [
        *LAYERS,
        *precision,
        *FACTORS["model"][cell[0]].split(),
        *FACTORS["balancing"][cell[1]].split(),
    ]


def run(folder: Path, name: str, ranks: int, *flags: str) -> Run:
    """Three steps of whole documents."""
    data = ["--data-path", str(folder / "docs"), "--split", "1", "--nsp-batch-tokens", "400"]
    return train(ranks, folder / name, *data, "--train-iters", str(STEPS), *flags)


@cache
def start(folder: Path, *model: str) -> list[str]:
    """The flags that start from one rank's weights of a model.

    Megatron-FSDP loads no such checkpoint; it is given no model that is split, which would begin
    with other weights.
    """
    if "--probe-float64" not in model:
        return list(model)
    path = folder / f"start-{len(model)}"
    return [*model, *shared_checkpoint(path, folder / "docs", *model)]


@cache
def one_rank(folder: Path, *model: str) -> Run:
    """One rank, a step in one micro-batch."""
    return run(folder, f"one-{len(model)}", 1, *start(folder, *model))


def run_cell(folder: Path, cell: Cell, *model: str) -> Run:
    """A cell on as many ranks as it needs.

    Args:
        folder: the documents.
        cell: its settings.
        model: the flags of the model, if not those of the cell.
    """
    chosen = dict(zip(FACTORS, cell, strict=True))
    is_split, is_staged = chosen["rows"] == "TP 2", chosen["stages"] != "PP 1"
    ranks = 8 if is_split and is_staged else 4
    domain = ranks // (1 + is_split) // (1 + is_staged)
    how = ("experts", "rows", "stages", "optimizer", "recompute", "policy")
    words = " ".join(FACTORS[name][chosen[name]] for name in how).split()
    words += ["--global-batch-size", str(domain * int(FACTORS["passes"][chosen["passes"]]))]
    if chosen["model"] == "experts" and is_split:
        words += SPLIT_ROWS
    name = "-".join([*cell, *model[-1:]]).replace(" ", "")
    return run(folder, name, ranks, *start(folder, *(model or model_flags(cell))), *words)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=", ".join(cell), marks=[pytest.mark.matrix] * (n >= IN_EVERY_RUN))
        for n, cell in enumerate(CELLS)
    ],
)
def test_a_cell_trains_as_one_rank(folder: Path, cell: Cell) -> None:
    model, many = model_flags(cell), run_cell(folder, cell)
    if "FSDP" not in cell:
        assert_same(one_rank(folder, *model), many, STEPS, 1e-9, 1e-9)
        return
    # In float32 the placement shows in small gradients: the same ranks without FSDP are the oracle.
    plain = tuple("DDP" if setting == "FSDP" else setting for setting in cell)
    assert_same(run_cell(folder, plain, *model), many, STEPS, 1e-6, 1e-6)


def test_every_pair_that_can_be_is_in_two_cells() -> None:
    met = Counter(itertools.chain.from_iterable(map(pairs, CELLS)))
    assert met.keys() == PAIRS and min(met.values()) == 2
    assert all(map(can_be, CELLS)) and len(set(CELLS)) == len(CELLS) > 2 * IN_EVERY_RUN
