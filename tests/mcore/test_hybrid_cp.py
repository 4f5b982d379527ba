"""Megatron's own hybrid context parallel scheduler as a policy: what it chose is what runs."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nsp.mcore.hybrid_cp import (
    MEGATRON_POLICIES,
    RankSet,
    nodes_of,
    plan_hybrid_cp,
    scheduled_groups,
)
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import BatchProblem, plan_batch
from tests.data_maker import write_documents
from tests.mcore.launch import train
from tests.unit.planner_cases import workstation

TREES = [(8, (1, 2, 4, 8)), (8, (1, 2)), (6, (1, 2)), (12, (1, 2, 4)), (4, (1,)), (1, (1,))]


def batch_of(num_ranks: int, degrees: tuple[int, ...], lengths, budget: int | None) -> BatchProblem:
    cost = workstation(num_ranks, degrees)
    return BatchProblem(cost.sample_times(np.array(sorted(lengths, reverse=True))), budget)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(TREES),
    st.lists(st.integers(1, 2000), min_size=1, max_size=24),
    st.sampled_from([None, 150, 700, 2000]),
)
def test_groups_are_micro_batches_and_sets_of_ranks_are_nodes(size, lengths, budget) -> None:
    """Nodes of a micro-batch share no rank; a set is cut only by the budget and by the tree."""
    num_ranks, degrees = size
    if budget is not None and max(lengths) > budget * degrees[-1]:
        return
    batch = batch_of(num_ranks, degrees, lengths, budget)
    try:
        groups = scheduled_groups(batch)
    except ValueError:  # it cannot enlarge its sets to every number of ranks
        assert num_ranks & (num_ranks - 1)
        return
    scheduled = [sample for group in groups for ranks in group for sample in ranks.samples]
    assert sorted(scheduled) == list(range(len(lengths)))
    assignment = plan_hybrid_cp(batch, len(lengths))
    assert assignment.is_complete
    plan = assignment.plan(
        batch, np.arange(len(lengths)), max(assignment.num_micro_batches_used, 1)
    )
    plan.validate()
    first = 0
    for group in groups:
        numbers = set()
        for ranks in group:
            nodes = {tuple(plan.node_of(sample)) for sample in ranks.samples}
            assert len(nodes) == 1, "the samples of a set stay together"
            degree = plan.tree.degree(plan.node_of(ranks.samples[0]))
            assert degree == max(d for d in degrees if d <= ranks.num_ranks)
            numbers |= set(plan.micro_batch[list(ranks.samples)].tolist())
        assert numbers == set(range(first, max(numbers) + 1)), "one group after the other"
        if budget is None:
            assert len(numbers) == 1
        first = max(numbers) + 1
    for micro_batch in range(plan.num_micro_batches):
        held = [r for node in plan.active_nodes(micro_batch) for r in plan.tree.ranks(node)]
        assert len(held) == len(set(held))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.permutations([1, 1, 1, 2, 2, 4, 8]), st.sampled_from([8, 12, 16, 24]))
def test_sets_in_any_order_find_aligned_nodes_of_their_size(sizes, num_ranks) -> None:
    """Also where they leave ranks idle; a set larger than the largest degree becomes smaller."""
    chosen = [n for number, n in enumerate(sizes) if sum(sizes[: number + 1]) <= num_ranks]
    tree = SPTree(num_ranks, (1, 2, 4))
    placed = nodes_of(tree, [RankSet(n, (number,)) for number, n in enumerate(chosen)])
    held = [
        rank
        for one in placed
        for rank in tree.ranks(tree.node(tree.degrees[one.column], one.index))
    ]
    assert len(held) == len(set(held)) and max(held) < num_ranks
    degree_of = {one.samples[0]: tree.degrees[one.column] for one in placed}
    assert degree_of == {number: min(n, 4) for number, n in enumerate(chosen)}


def test_the_scheduler_decides_the_degree_by_memory() -> None:
    batch = batch_of(8, (1, 2, 4, 8), [800, 300, 150, 90, 80], 200)
    groups = scheduled_groups(batch)
    sizes = {sample: r.num_ranks for group in groups for r in group for sample in r.samples}
    assert sizes[0] >= 4 and sizes[1] >= 2
    plan = plan_hybrid_cp(batch, 9).plan(batch, np.arange(5), 9)
    assert plan.over_budget_tokens() == 0


def test_micro_batches_beyond_the_fixed_number_are_carried() -> None:
    cost, lengths = workstation(4, (1, 2, 4)), [4000] * 3
    how = {"policy": "megatron-hybrid-cp", "more_policies": MEGATRON_POLICIES}
    result = plan_batch(lengths, cost.tree, cost, token_budget=1000, num_micro_batches=2, **how)
    assert result.plan.carried.tolist() == [2] and result.report.num_micro_batches_used == 2


def test_where_the_scheduler_gives_up_one_line_says_so() -> None:
    batch = batch_of(5, (1,), [1017, 764], 1018)
    with pytest.raises(ValueError, match="scheduler gives up on 2 samples of 764 to 1017 tokens"):
        plan_hybrid_cp(batch, 2)


def test_other_chains_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hybrid-cp needs degrees that are powers of two, got \["):
        plan_hybrid_cp(batch_of(12, (1, 3, 6), [50], None), 1)


def test_a_run_trains_on_its_plans(tmp_path: Path) -> None:
    """The same losses as the data say, whatever the plan: against the search's run."""
    write_documents(tmp_path / "docs", [130, 77, 64, 31, 8, 3, 55, 200, 12, 5] * 4, seed=3)
    flags = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", "300"]
    flags += ["--train-iters", "2", "--global-batch-size", "8"]
    plans = tmp_path / "plans.jsonl"
    hybrid = ["--nsp-policy", "megatron-hybrid-cp", "--nsp-record-plans", str(plans)]
    ours, theirs = train(4, tmp_path / "a", *flags), train(4, tmp_path / "b", *flags, *hybrid)
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-5)
    for line in plans.read_text().splitlines():
        plan = Plan.from_json(line)
        assert plan.num_micro_batches == 2 and not len(plan.carried)
