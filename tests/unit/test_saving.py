"""Pure tests of the marks: against bytes counted token by token, and cuts taken to the byte.

Case H2 of docs/cases.md, as far as marks go.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import (
    NOTHING_SAVED,
    SavedSamples,
    SavedSizes,
    mark_saved,
    saved_bytes,
)
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.testing.random_plans import random_splits, random_step

HEADS, VALUE_DIM, ELEMENT_BYTES, LAYERS = 8, 4, 2, 3
OUTPUT = SavedSizes(HEADS, HEADS * VALUE_DIM * ELEMENT_BYTES, 4, LAYERS)


def step(seed: int) -> Plan:
    """Up to three micro-batches on eight ranks, nodes split in every way."""
    rng = random.Random(seed)
    return random_splits(rng, random_step(rng, 8), HEADS, 2)


def counted_bytes(plan: Plan, saved: SavedSamples, micro_batch: int, rank: int) -> int:
    """What a rank saves, from the tokens that the layout gives every rank."""
    total = 0
    for part in rank_layout(plan, rank, micro_batch).slices:
        marked = set(part.samples[: saved.of_node(micro_batch, part.node)].tolist())
        first_rank = plan.tree.ranks(part.node)[0]
        rows = {}
        for other in plan.tree.ranks(part.node):
            (same,) = (
                p for p in rank_layout(plan, other, micro_batch).slices if p.node == part.node
            )
            rows[other] = sum(b - a for sample, a, b in same.segments() if sample in marked)
        first = first_rank + part.member * part.member_ranks
        stream = sum(rows[other] for other in range(first, first + part.member_ranks))
        total += rows[rank] * HEADS * VALUE_DIM * ELEMENT_BYTES
        total += HEADS // part.member_ranks * stream * 4
    return LAYERS * total


@pytest.mark.parametrize("seed", range(60))
def test_bytes_are_those_of_every_rank_s_own_tokens_and_within_the_budget(seed: int) -> None:
    plan = step(seed)
    everything = mark_saved(plan, OUTPUT, float("inf"))
    budget = random.Random(seed).randint(0, everything.rank_bytes)
    for saved in (everything, mark_saved(plan, OUTPUT, budget)):
        most = 0
        for m in range(plan.num_micro_batches):
            counted = [counted_bytes(plan, saved, m, rank) for rank in range(8)]
            assert saved_bytes(plan, saved, OUTPUT, m).tolist() == counted
            most = max(most, *counted)
        assert saved.rank_bytes == most
    assert most <= budget
    runs = np.flatnonzero(plan.micro_batch >= 0)
    assert sorted(everything.samples(plan).tolist()) == runs.tolist()
    assert not everything.recomputed(plan).active_nodes()
    assert mark_saved(plan, OUTPUT, 0.0) == NOTHING_SAVED


@pytest.mark.parametrize("seed", range(30))
def test_each_node_takes_all_that_the_tightest_rank_has_room_for(seed: int) -> None:
    plan = step(seed)
    budget = random.Random(seed).random() * mark_saved(plan, OUTPUT, float("inf")).rank_bytes
    saved = mark_saved(plan, OUTPUT, budget)
    for m in range(plan.num_micro_batches):
        for node in plan.active_nodes(m):
            count = saved.of_node(m, node)
            if count == len(plan.samples_of(node, m)):
                continue
            # One more here, nothing deeper: what came before already leaves no room for it.
            marks = {
                (m, other): saved.of_node(m, other)
                for other in plan.active_nodes(m)
                if other.depth <= node.depth
            }
            more = SavedSamples(marks | {(m, node): count + 1})
            held = saved_bytes(plan, more, OUTPUT, m)
            assert max(held[rank] for rank in plan.tree.ranks(node)) > budget


def test_h2_the_rank_with_one_token_more_decides_for_all() -> None:
    tree = SPTree(4, (1, 2, 4))
    nodes = [tree.node(4, 0), tree.node(2, 0), tree.node(1, 3)]
    plan = Plan.from_nodes(tree, [41, 5, 9], nodes)  # slices of 10, 10, 10 and 11 tokens
    output = SavedSizes(num_heads=4, row_bytes=32, lse_bytes=4, num_layers=1)
    root = [tokens * 32 + 41 * 4 for tokens in (10, 10, 10, 11)]
    everything = mark_saved(plan, output, root[3] + 9 * (32 + 16))
    assert everything.num_saved == {(0, nodes[0]): 1, (0, nodes[1]): 1, (0, nodes[2]): 1}
    assert mark_saved(plan, output, root[3]).num_saved == {(0, nodes[0]): 1}
    short = mark_saved(plan, output, root[3] - 1)  # rank 3 has no room, ranks 0 to 2 would have
    assert (0, nodes[0]) not in short.num_saved and (0, nodes[1]) in short.num_saved


def test_h2_another_process_with_another_hash_seed_marks_the_same() -> None:
    code = (
        "import json\n"
        "from megatron_nsp.plan.saving import mark_saved\n"
        "from tests.unit.test_saving import OUTPUT, step\n"
        "saved = [mark_saved(step(seed), OUTPUT, 900.0).num_saved for seed in range(20)]\n"
        "print(json.dumps([[str(item) for item in each.items()] for each in saved]))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] and any(json.loads(found[0]))


def test_rows_cost_nothing_where_the_next_module_holds_them() -> None:
    plan = step(3)
    only_lse = replace(OUTPUT, row_bytes=0)
    everything = mark_saved(plan, only_lse, float("inf"))
    assert 0 < everything.rank_bytes < mark_saved(plan, OUTPUT, float("inf")).rank_bytes
    assert everything.num_saved == mark_saved(plan, only_lse, everything.rank_bytes).num_saved
