"""Balancing of experts: Megatron's own on one rank, and ours on several, wherever tokens lie.

The oracle is Megatron's router as it is, on one rank that holds every token of a micro-batch
(`watch_experts.route_as_megatron`); of losses by document it is given each document alone. Cases G3
and M11 of docs/cases.md.
"""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_nsp.mcore.moe.balancing import Counts, document_shares, micro_batch_shares
from megatron_nsp.mcore.moe.rows import RowDocuments
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.steps.sampler import Batch
from tests.data_maker import write_documents
from tests.mcore.launch import MOE, Run, shared_checkpoint, train
from tests.mcore.plans import EVERY_KIND, MakePlan, batches, root
from tests.mcore.test_equality import assert_same

BATCH_TOKENS, STEPS = 700, len(EVERY_KIND)
BALANCED = "--moe-router-load-balancing-type {} --moe-aux-loss-coeff {}"
LOSSES = {
    "aux": BALANCED.format("aux_loss", 0.1),
    "seq": BALANCED.format("seq_aux_loss", 0.2),
    "global": BALANCED.format("global_aux_loss", 0.3),
    "all": BALANCED.format("seq_aux_loss global_aux_loss aux_loss", "0.2 0.3 0.1")
    + " --moe-z-loss-coeff 0.05",
    "sinkhorn": BALANCED.format("sinkhorn", 0),
}
FREQUENCY = {"global": ["--moe-layer-freq", "[1,0]"]}
"""A model without experts in its last layer."""

BIASED = (  # noqa: SIM905 - reads as the command line it is
    "--num-experts 8 --moe-router-score-function sigmoid --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-dtype fp64 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-shared-expert-intermediate-size 48"
).split()


def in_two_parts(kind: MakePlan, tree: SPTree, lengths: np.ndarray, rng: random.Random) -> Plan:
    """Every other sample in the first micro-batch; with the last kind all in the second.

    Roots are rings, whose ranks hold two chunks of a sample.
    """
    micro_batch = np.arange(len(lengths)) % 2
    if kind is EVERY_KIND[-1]:
        micro_batch[:] = 1
    nodes = [tree.node(1, 0)] * len(lengths)
    for m in np.unique(micro_batch):
        places = np.flatnonzero(micro_batch == m)
        part = kind(tree, lengths[places], rng)
        for number, place in enumerate(places):
            nodes[place] = part.node_of(number)
    ring = Split(tree.num_ranks)
    is_root = kind is root and tree.num_ranks > 1
    splits = {(int(m), tree.node(tree.num_ranks, 0)): ring for m in np.unique(micro_batch)}
    return Plan.from_nodes(tree, lengths, nodes, micro_batch, 2, splits=splits if is_root else None)


def record(path: Path, tree: SPTree, drawn: list[Batch]) -> None:
    """Writes plans for the batches, every kind of placement one after the other."""
    rng, kinds = random.Random(0), EVERY_KIND * len(drawn)
    plans = [
        in_two_parts(kind, tree, batch.lengths, rng)
        for kind, batch in zip(kinds, drawn, strict=False)
    ]
    path.write_text("".join(plan.to_json() + "\n" for plan in plans))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Documents of one token to 512, and plans for domains of 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("balancing")
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(3.5, 1.4, 300), 1, 512).astype(int)
    lengths[:20] = [1, 2, 3, 1, 512, 1, 7, 1, 300, 400, 1, 2, 3, 1, 510, 511, 512, 1, 1, 64]
    write_documents(folder / "docs", lengths.tolist(), seed=2)
    drawn = batches(folder / "docs", 20, BATCH_TOKENS)
    for degrees in ((1,), (1, 2), (1, 2, 4)):
        record(folder / f"plans-{degrees[-1]}.jsonl", SPTree(degrees[-1], degrees), drawn)
    yield folder
    start.cache_clear()


@cache
def start(folder: Path, *model: str) -> list[str]:
    """A model in float64, and the flags that start from its weights."""
    flags = [*MOE, *model, "--probe-float64"]
    path = folder / f"start-{len(model)}"
    return [*flags, *shared_checkpoint(path, folder / "docs", *flags)]


def balanced(folder: Path, name: str) -> list[str]:
    """The flags of a model with these losses."""
    return [*start(folder, *FREQUENCY.get(name, ())), *LOSSES[name].split()]


def run(folder: Path, name: str, domain: int, steps: int, *args: str, ranks: int = 0) -> Run:
    """A run with the recorded plans of a domain of so many ranks."""
    flags = ["--data-path", str(folder / "docs"), "--train-iters", str(steps)]
    flags += ["--nsp-batch-tokens", str(BATCH_TOKENS), "--lr-decay-iters", "20"]
    flags += ["--nsp-policy", f"file:{folder / f'plans-{domain}.jsonl'}", "--probe-experts"]
    flags += ["--global-batch-size", str(2 * domain)]
    return train(ranks or domain, folder / name, *flags, *args)


def assert_same_figures(one: Run, other: Run, steps: int) -> None:
    """What Megatron logs of every layer's losses, on every rank of the last stage."""
    for step in range(steps):
        expected, got = (each.steps[-1][step]["figures"] for each in (one, other))
        assert any(any(values) for values in expected.values())
        for name, values in expected.items():
            np.testing.assert_allclose(got[name], values, rtol=1e-9, err_msg=f"{step} {name}")


def test_g3_two_documents_of_one_expert_each_are_not_balanced() -> None:
    """Two experts, one for each document: quite uneven in each, even in both together."""
    counts = Counts(torch.tensor([8, 8]), torch.tensor([[8, 0], [0, 8], [0, 0]]))
    documents = RowDocuments(
        row_document=torch.tensor([0, 0, 1, 2]),  # the rest of the rows are on other ranks
        lengths=torch.tensor([8, 8, 1]),
        shared=torch.tensor([0]),
        shared_place=torch.tensor([0]),
        num_shared=1,
    )
    rows: Any = SimpleNamespace(documents=documents, num_tokens=16)
    assert document_shares(counts, rows, 1).tolist() == [[2, 0], [2, 0], [0, 2], [0, 0]]
    assert micro_batch_shares(counts, rows, 1).tolist() == [1, 1]


Oracles = dict[str, Run]


@pytest.fixture(scope="module")
def oracles(folder: Path) -> Oracles:
    """Megatron's own training on one rank, with each loss."""
    oracle = "--probe-megatron-routing"
    return {
        name: run(folder, f"{name}-1", 1, STEPS, *balanced(folder, name), oracle) for name in LOSSES
    }


@pytest.mark.parametrize(
    ("name", "domain", "split"),
    [
        ("aux", 4, "--expert-model-parallel-size 2"),
        ("seq", 4, "--expert-model-parallel-size 1"),
        ("global", 2, "--pipeline-model-parallel-size 2"),
        ("all", 4, "--expert-model-parallel-size 4"),
        ("sinkhorn", 4, "--expert-model-parallel-size 2"),
    ],
)
def test_losses_alone_and_together(
    folder: Path, oracles: Oracles, name: str, domain: int, split: str
) -> None:
    flags = [*balanced(folder, name), *split.split()]
    four = run(folder, f"{name}-4", domain, STEPS, *flags, ranks=4)
    assert_same(oracles[name], four, STEPS, 1e-9, 1e-12)
    if name != "sinkhorn":
        assert_same_figures(oracles[name], four, STEPS)


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_what_is_recomputed_counts_once(folder: Path, oracles: Oracles, method: str) -> None:
    how = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 1"
    flags = [*balanced(folder, "all"), *how.split(), "--expert-model-parallel-size", "2"]
    four = run(folder, method, 4, STEPS, *flags)
    assert_same(oracles["all"], four, STEPS, 1e-9, 1e-12)
    assert_same_figures(oracles["all"], four, STEPS)


def test_stages_and_split_rows(folder: Path, oracles: Oracles) -> None:
    """Two tensor-parallel ranks with a part of the rows each, on every one of two stages.

    The first stage has both micro-batches in flight when it runs the experts of one of them again.
    """
    words = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    words += " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    words += " --recompute-granularity selective --recompute-modules moe"
    words += " --spec tests.mcore.split_norms layer_spec"
    eight = run(folder, "split", 2, STEPS, *balanced(folder, "all"), *words.split(), ranks=8)
    assert_same(oracles["all"], eight, STEPS, 1e-9, 1e-9)
    assert_same_figures(oracles["all"], eight, STEPS)


def test_biases_and_what_goes_with_them_over_twenty_steps(folder: Path) -> None:
    """Sigmoid scores, groups of experts, routing in float64, shared experts, loss by document."""
    words = [*start(folder, *BIASED), *LOSSES["seq"].split()]
    one = run(folder, "biased-1", 1, 20, *words, "--probe-megatron-routing")
    four = run(folder, "biased-4", 4, 20, *words, "--expert-model-parallel-size", "2")
    assert_same(one, four, 20, 1e-9, 1e-12)
    for step in range(20):
        expected, got = (each.steps[-1][step]["biases"] for each in (one, four))
        assert len(expected) == 2 and expected.keys() == got.keys()
        assert all(bias.equal(got[name]) for name, bias in expected.items())
    assert all(bias.any() for bias in one.steps[0][19]["biases"].values())
