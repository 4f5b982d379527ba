"""Every backend through Megatron's own loop: same losses and gradients as on one rank, in float64.

Case B2 of docs/cases.md, and degrees above the number of heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree
from tests.data_maker import write_documents
from tests.mcore.launch import Run, shared_checkpoint, train
from tests.mcore.plans import MakePlan, batches, mixed, record, root
from tests.mcore.test_equality import assert_same

BATCH_TOKENS, STEPS = 600, 6
TREE = SPTree(4, (1, 2, 4))

RING: dict[str, Callable[[int], Split]] = {
    "ring": Split,
    "usp": lambda degree: Split(2),
    "gather": lambda degree: Split(degree, "gather"),
}


def split_plan(place: MakePlan, backend: str, *args: object) -> Plan:
    """A plan of this kind whose nodes above degree 1 are all split so."""
    plan = place(*args)
    nodes = [node for node in plan.active_nodes() if plan.tree.degree(node) > 1]
    splits = {(0, node): RING[backend](plan.tree.degree(node)) for node in nodes}
    return replace(plan, splits=splits)


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents from one token to the longest allowed."""
    prefix = tmp_path_factory.mktemp("backends") / "docs"
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(3.5, 1.4, 200), 1, 512).astype(int)
    lengths[:12] = [1, 2, 3, 1, 512, 1, 7, 1, 300, 5, 509, 64]
    write_documents(prefix, lengths.tolist(), seed=4)
    return prefix


def run(docs: Path, name: str, num_ranks: int, steps: int, *args: str) -> Run:
    flags = ["--data-path", str(docs), "--train-iters", str(steps), "--lr-decay-iters", "20"]
    flags += ["--nsp-batch-tokens", str(BATCH_TOKENS), "--probe-float64"]
    return train(num_ranks, docs.with_name(name), *flags, *args)


def test_ring_usp_and_gather_equal_one_rank(docs: Path) -> None:
    start = shared_checkpoint(docs.with_name("even"), docs, "--probe-float64")
    plans = docs.with_name("plans.jsonl")
    kinds = tuple(partial(split_plan, kind, name) for name in RING for kind in (root, mixed))
    made = record(plans, TREE, batches(docs, STEPS, BATCH_TOKENS), kinds)
    found = {s.label(p.tree.degree(node)) for p in made for (_, node), s in p.splits.items()}
    assert found == set(RING)
    one = run(docs, "even-1", 1, STEPS, *start)
    four = run(docs, "even-4", 4, STEPS, *start, "--nsp-policy", f"file:{plans}")
    assert_same(one, four, STEPS, 1e-9, 1e-12)


UNEVEN = {
    "5 heads": "--num-attention-heads 5 --num-query-groups 5 --kv-channels 8",
    "degree above heads": "--num-attention-heads 2 --num-query-groups 1 --kv-channels 8",
}


@pytest.mark.parametrize("heads", UNEVEN)
def test_b2_heads_that_do_not_divide(docs: Path, heads: str) -> None:
    folder, model = heads.replace(" ", "-"), UNEVEN[heads].split()
    start = shared_checkpoint(docs.with_name(folder), docs, "--probe-float64", *model)
    one = run(docs, f"{folder}-1", 1, 2, *start, *model)
    for backend, said in (("auto", "nodes: "), ("usp", "usp: " if "above" in heads else "ring: ")):
        flags = ["--nsp-backend", backend, "--nsp-policy", "root"]
        four = run(docs, f"{folder}-{backend}", 4, 2, *start, *model, *flags)
        assert_same(one, four, 2, 1e-9, 1e-12)
        assert "degrees [1, 2, 4]" in four.output and f"backend {backend}" in four.output
        assert four.output.count(said) == 2, four.output


def test_recorded_plans_that_heads_cannot_follow_are_refused(docs: Path) -> None:
    plans = docs.with_name("wrong.jsonl")
    record(plans, TREE, batches(docs, 1, BATCH_TOKENS), (root,))
    flags = ["--nsp-policy", f"file:{plans}", *UNEVEN["5 heads"].split()]
    with pytest.raises(AssertionError) as caught:
        run(docs, "wrong", 4, 1, *flags)
    said = "plan 0: node 4:0 cannot split 5 query and 5 key/value heads over 4 ranks evenly"
    assert said in str(caught.value)
