"""Pure tests of the baseline policies: what each promises, and what all of them do.

FlexSP's own parts are in test_flexsp.py; Megatron's scheduler in tests/mcore/test_hybrid_cp.py.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nsp.cli import main
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import (
    Assignment,
    BatchProblem,
    MicroBatchProblem,
    MicroBatchState,
    Placement,
    as_batch_policy,
    plan_batch,
    policy_names,
)
from megatron_nsp.planner.policies import CHEAP, POLICIES, check_can_train, portfolio_of
from megatron_nsp.planner.policies.algorithm_1 import Algorithm1, place_algorithm_1
from megatron_nsp.planner.policies.dynamic_cp import memory_minimum_columns, place_dynamic_cp
from tests.unit.planner_cases import cluster, drawn, moe, workstation

FOUR = workstation(4, (1, 2, 4))
EIGHT = workstation(8, (1, 2, 4, 8))
TWELVE = workstation(12, (1, 3, 6, 12))


def problem_of(cost: CostModel, lengths: list[int], budget: int | None = None) -> MicroBatchProblem:
    """One micro-batch with these lengths, which are descending."""
    return BatchProblem(cost.sample_times(np.array(lengths)), budget).in_one_micro_batch


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from([FOUR, TWELVE, workstation(3, (1,)), workstation(8, (1, 2, 4))]),
    st.lists(st.integers(1, 900), max_size=16) | st.builds(lambda n: [300] * n, st.integers(1, 16)),
    st.sampled_from([None, 90, 300, 901]),
    st.sampled_from([1, 2, None]),
    st.data(),
)
def test_every_plan_is_complete_or_carries_and_keeps_the_budget(
    cost, lengths, budget, num_micro_batches, data
) -> None:
    """Or the policy refuses in one line; and a second call gives the same plan."""
    names = [name for name in policy_names(cost.tree) if name != "flexsp-10s"]
    policy = data.draw(st.sampled_from(names))

    def plan():
        how = {"token_budget": budget, "num_micro_batches": num_micro_batches, "policy": policy}
        return plan_batch(lengths, cost.tree, cost, **how).plan

    try:
        found, refusal = plan(), ""
    except ValueError as error:
        found, refusal = None, str(error)
    if found is None:
        assert refusal and "\n" not in refusal
        never_fits = budget and max(lengths) > budget * cost.tree.max_degree
        assert never_fits or "never fits" in refusal or policy == "basp", refusal
        return
    found.validate()
    assert found.digest == plan().digest
    assert budget is None or found.over_budget_tokens() == 0
    if num_micro_batches is None or budget is None:
        assert not len(found.carried)
    if lengths:
        assert found.micro_batch[int(np.argmax(lengths))] >= 0
    if num_micro_batches is not None:
        assert found.num_micro_batches == num_micro_batches


def test_a_policy_that_never_gets_a_sample_placed_is_an_error_not_an_endless_run() -> None:
    with pytest.raises(ValueError, match="policy dp never fits sample 0, 901 tokens, into the tok"):
        plan_batch([901, 5], FOUR.tree, FOUR, token_budget=900, policy="dp")


def test_dp_is_static_one_by_another_name() -> None:
    lengths = drawn("paper-mix", 0, 40_000, 10_000)
    digests = {
        plan_batch(lengths, EIGHT.tree, EIGHT, policy=name).plan.digest
        for name in ("dp", "static-1", "leaves")
    }
    assert len(digests) == 1


def test_the_portfolio_holds_the_cheap_policies_and_leaves_out_those_that_refuse() -> None:
    assert set(CHEAP) == {"two-level", "disjoint-lpt", "megatron-dynamic-cp", "basp"}
    mixed = plan_batch([900, 900, 5], FOUR.tree, FOUR).report
    assert mixed.infeasible == ("basp",) and "basp" not in mixed.policies
    equal = plan_batch([900] * 4, FOUR.tree, FOUR).report
    assert equal.infeasible == () and set(CHEAP) < set(equal.policies)


def test_policies_from_elsewhere_are_called_by_name_and_listed() -> None:
    def on_the_last_leaf(batch: BatchProblem, max_micro_batches: int) -> Assignment:
        state, everything = MicroBatchState(batch.in_one_micro_batch), np.arange(len(batch.lengths))
        state.add(0, everything, np.full(len(everything), 3))
        return Assignment.of_placements(len(everything), [(everything, state.placement())])

    more = {"last-leaf": on_the_last_leaf}
    assert policy_names(FOUR.tree, more) == (*policy_names(FOUR.tree), "last-leaf")
    plan = plan_batch([5, 9], FOUR.tree, FOUR, policy="last-leaf", more_policies=more).plan
    assert plan.token_load().tolist() == [0, 0, 0, 14]
    with pytest.raises(ValueError, match="no policy last-leaf, only auto, search"):
        plan_batch([5, 9], FOUR.tree, FOUR, policy="last-leaf")


def test_a_policy_stopped_by_the_clock_cannot_train() -> None:
    with pytest.raises(ValueError, match="flexsp-10s is stopped by the clock: ranks would disagr"):
        check_can_train("flexsp-10s")
    for name in set(POLICIES) - {"flexsp-10s"}:
        check_can_train(name)


@pytest.mark.parametrize("cost", [FOUR, cluster(8, 8), moe(8, 4), moe(8, 8, (1, 2))])
@pytest.mark.parametrize("seed", range(6))
def test_no_policy_of_the_portfolio_is_below_what_it_says_it_takes(cost, seed: int) -> None:
    rng = random.Random(seed)
    drawn_lengths = [int(50_000 ** rng.random()) for _ in range(rng.randint(1, 9))]
    lengths = np.array(sorted(drawn_lengths, reverse=True))
    budget = None if seed % 2 else int(lengths[0])
    batch, num_bounded = BatchProblem(cost.sample_times(lengths), budget), 0
    for name, policy in portfolio_of(cost.tree).items():
        try:
            assignment = policy(batch, len(lengths))
        except ValueError:
            continue
        score = assignment.score(batch.times, assignment.num_micro_batches_used)
        least_us = score.load_no_latency_us - assignment.num_micro_batches_used * score.bias_us
        assert policy.bound_us(batch) <= least_us * (1 + 1e-9), name
        num_bounded += policy.bound_us(batch) > 0.5 * least_us
    assert num_bounded


# --- BASP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_samples", "degree"), [(1, 8), (2, 4), (4, 2), (8, 1), (24, 1)])
def test_basp_gives_equal_samples_equal_contiguous_groups(num_samples: int, degree: int) -> None:
    plan = plan_batch([600] * num_samples, EIGHT.tree, EIGHT, policy="basp").plan
    assert {EIGHT.tree.degree(plan.node_of(j)) for j in range(num_samples)} == {degree}
    ranks = [EIGHT.tree.ranks(plan.node_of(j)) for j in range(min(num_samples, 8))]
    assert ranks == [range(j * degree, (j + 1) * degree) for j in range(min(num_samples, 8))]
    assert set(plan.token_load().tolist()) == {600 * num_samples // 8}


@pytest.mark.parametrize("cost", [EIGHT, TWELVE, cluster(16, 16)])
@pytest.mark.parametrize("length", [64, 3_000, 100_000])
def test_the_search_is_never_slower_than_basp_on_equal_samples(cost, length) -> None:
    num_tried = 0
    for num_samples in (1, 2, 3, 4, 6, 8, 12, 16, 40):
        lengths = [length] * num_samples
        try:
            basp = plan_batch(lengths, cost.tree, cost, policy="basp").report
        except ValueError:
            continue
        search = plan_batch(lengths, cost.tree, cost, policy="search").report
        assert search.load_us <= basp.load_us * (1 + 1e-12)
        num_tried += 1
    assert num_tried >= 4


@pytest.mark.parametrize(
    ("cost", "lengths", "message"),
    [
        (EIGHT, [600, 600, 599], "needs samples of one length, got 599 to 600 tokens"),
        (EIGHT, [600] * 3, "cannot give 3 samples equal shares of 8 ranks"),
        (FOUR, [9] * 3, "cannot give 3 samples equal shares of 4 ranks"),
        (TWELVE, [600] * 6, "needs degree 2 for 6 samples on 12 ranks, which is not in the chain"),
        (EIGHT, [600] * 5, "cannot give 5 samples equal shares of 8 ranks"),
    ],
)
def test_basp_refuses_what_its_paper_leaves_open(cost, lengths, message) -> None:
    with pytest.raises(ValueError, match=f"policy basp {message}"):
        plan_batch(lengths, cost.tree, cost, policy="basp")


def test_basp_runs_equal_micro_batches_under_a_budget_and_refuses_what_they_do_not_hold() -> None:
    how = {"token_budget": 600, "policy": "basp"}
    plan = plan_batch([600] * 16, EIGHT.tree, EIGHT, num_micro_batches=3, **how).plan
    assert plan.micro_batch.tolist() == [0] * 8 + [1] * 8
    assert plan.token_load(0).tolist() == plan.token_load(1).tolist() == [600] * 8
    with pytest.raises(
        ValueError, match="no equal micro-batches, at most 1, that hold 16 samples of 600"
    ):
        plan_batch([600] * 16, EIGHT.tree, EIGHT, num_micro_batches=1, **how)


# --- Algorithm 1 ----------------------------------------------------------------------------------


def by_hand(problem: MicroBatchProblem, prefix_size: int, beam_width: int) -> int:
    """The paper's pseudocode, state by state in plain Python: the least max C."""
    tree = problem.tree
    nodes = [(tree.degrees.index(tree.degree(node)), tree.ranks(node)) for node in tree.nodes()]

    def extended(state, sample, node):
        load, taken = state
        k, ranks = nodes[node]
        added = int(problem.total_ns[sample, k])
        if node not in taken:
            added += 2 * int(problem.latency_ns[k])
        return (
            [value + added * (rank in ranks) for rank, value in enumerate(load)],
            taken | {node},
        )

    beam = [([0] * tree.num_ranks, frozenset())]
    for sample in range(min(prefix_size, problem.num_samples)):
        grown = [extended(state, sample, node) for state in beam for node in range(len(nodes))]
        beam = sorted(grown, key=lambda state: max(state[0]))[:beam_width]
    leaves = [node for node, (k, _) in enumerate(nodes) if k == 0]
    finished = []
    for state in beam:
        for sample in range(prefix_size, problem.num_samples):
            state = min(
                (extended(state, sample, leaf) for leaf in leaves),
                key=lambda after, before=state: max(
                    new for new, old in zip(after[0], before[0], strict=True) if new != old
                ),
            )
        finished.append(max(state[0]))
    return min(finished)


@pytest.mark.parametrize(("prefix_size", "beam_width"), [(1, 1), (3, 2), (4, 5), (9, 3)])
def test_algorithm_1_is_the_pseudocode(prefix_size: int, beam_width: int) -> None:
    rng = np.random.default_rng(0)
    for cost in (FOUR, TWELVE, cluster(8, 8)) * 4:
        lengths = np.sort(np.exp(rng.uniform(4, 11, rng.integers(1, 9))).astype(int))[::-1]
        problem = problem_of(cost, lengths.tolist())
        placement = place_algorithm_1(problem, Algorithm1(prefix_size, beam_width))
        state = MicroBatchState(problem)
        for k in range(len(cost.tree.degrees)):
            of_column = np.flatnonzero(placement.column == k)
            state.add(k, of_column, placement.index[of_column])
        critical_ns = int((state.fwd_ns + state.bwd_ns).max())
        assert critical_ns == by_hand(problem, prefix_size, beam_width)


def test_algorithm_1_spreads_its_prefix_where_the_search_does_not() -> None:
    """Its key sees no work, only the slowest rank: the example that our own key exists for."""
    cost = cluster(8, 8)
    problem = problem_of(cost, [8_000] * 8)
    placement = place_algorithm_1(problem, Algorithm1(4, 1))
    assert placement.column[:4].tolist() == [3] * 4  # on all eight ranks, one after the other
    assert placement.column[4:].tolist() == [0] * 4
    assert (
        POLICIES["search"](BatchProblem(cost.sample_times(problem.lengths), None), 1).column.max()
        == 0
    )


def test_algorithm_1_puts_the_tail_where_every_sample_of_it_fits() -> None:
    """A budget of 300: with a prefix of one, the tail's 500 tokens need two ranks."""
    rules, lengths = Algorithm1(prefix_size=1), [1000, 500, 40, 30]
    placement = place_algorithm_1(problem_of(FOUR, lengths, 300), rules)
    assert placement.column[2:].tolist() == [1, 1] and placement.unplaced.tolist() == [1]
    roomy = place_algorithm_1(problem_of(FOUR, lengths, 520), rules)
    assert roomy.column[1:].tolist() == [0, 0, 0] and not len(roomy.unplaced)


# --- Megatron's dynamic context parallelism -------------------------------------------------------


def test_dynamic_cp_gives_every_sample_the_least_degree_that_holds_it() -> None:
    problem = problem_of(EIGHT, [800, 401, 400, 200, 101, 100, 100, 3], 100)
    assert memory_minimum_columns(problem).tolist() == [3, 3, 2, 1, 1, 0, 0, 0]
    without = problem_of(EIGHT, [800, 401, 3])
    assert memory_minimum_columns(without).tolist() == [0, 0, 0]


def test_dynamic_cp_keeps_groups_apart_and_shares_out_all_ranks() -> None:
    placement = place_dynamic_cp(problem_of(EIGHT, [400, 200, 100, 60, 40], 100))
    assert placement.column.tolist() == [2, 1, 0, 0, 0]
    assert placement.index.tolist() == [0, 2, 6, 7, 7]
    full = place_dynamic_cp(problem_of(EIGHT, [400, 200, 150, 100, 60, 40], 100))
    assert full.index.tolist()[:3] == [0, 2, 3]  # 200 + 150 tokens fill the ranks 4 to 7
    assert full.unplaced.tolist() == [3, 4, 5]


def test_dynamic_cp_never_nests() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        lengths = np.exp(rng.uniform(3, 8, rng.integers(1, 40))).astype(int)
        how = {"token_budget": 400, "num_micro_batches": None, "policy": "megatron-dynamic-cp"}
        plan = plan_batch(lengths, EIGHT.tree, EIGHT, **how).plan
        for micro_batch in range(plan.num_micro_batches):
            assert all(len(plan.active_path(rank, micro_batch)) <= 1 for rank in range(8))
        least = np.array([min(d for d in (1, 2, 4, 8) if n <= 400 * d) for n in lengths])
        assert (2 ** (3 - plan.depth) == least).all()


def test_dynamic_cp_without_a_budget_is_data_parallel() -> None:
    lengths = drawn("wikipedia", 0, 30_000, 8_000)
    dynamic = plan_batch(lengths, EIGHT.tree, EIGHT, policy="megatron-dynamic-cp").plan
    assert dynamic.digest == plan_batch(lengths, EIGHT.tree, EIGHT, policy="dp").plan.digest


def test_a_tree_of_leaves_alone_is_served_by_all() -> None:
    cost = workstation(3, (1,))
    for policy in policy_names(SPTree(3, (1,))):
        plan = plan_batch([70] * 3, cost.tree, cost, policy=policy).plan
        assert sorted(plan.index.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_the_paper_s_rules_hold_in_algorithm_1(seed: int) -> None:
    rng = random.Random(seed)
    lengths = sorted((int(60_000 ** rng.random()) for _ in range(30)), reverse=True)
    problem = BatchProblem(FOUR.sample_times(np.array(lengths)), None).in_one_micro_batch
    rules = Algorithm1(prefix_size=12, is_monotone=True, leaf_degree=2)
    placement = place_algorithm_1(problem, rules)
    assert (np.diff(placement.column[:12]) <= 0).all()
    assert (placement.column[12:] == 1).all() and not len(placement.unplaced)


def test_a_leaf_degree_that_the_tree_lacks_is_refused() -> None:
    problem = BatchProblem(FOUR.sample_times(np.array([9])), None).in_one_micro_batch
    with pytest.raises(ValueError, match=r"leaf degree 3 is not in the chain \[1, 2, 4\]"):
        place_algorithm_1(problem, Algorithm1(leaf_degree=3))


def _place_longest_at_the_root(problem: MicroBatchProblem) -> Placement:
    """The longest sample at the root, all others on rank 0."""
    state = MicroBatchState(problem)
    state.place_level(len(problem.tree.degrees) - 1, np.arange(1))
    placement = state.placement()
    column, index = np.zeros(problem.num_samples, dtype=np.int64), placement.index.copy()
    column[:1], index[1:] = placement.column[:1], 0
    return Placement(column, index, 0)


def test_a_new_policy_is_a_function_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As CONTRIBUTING says: planned with, scored, simulated and let train by its name."""
    monkeypatch.setitem(POLICIES, "toy", as_batch_policy(_place_longest_at_the_root))
    assert "toy" in policy_names(EIGHT.tree)
    result = plan_batch([50, 900, 30], EIGHT.tree, EIGHT, policy="toy")
    assert result.plan.depth.tolist() == [3, 0, 3] and result.plan.index.tolist() == [0, 0, 0]
    assert result.report.load_us > plan_batch([50, 900, 30], EIGHT.tree, EIGHT).report.load_us
    check_can_train("toy")
    lengths = ["--lengths", "paper-mix", "--ranks", "8", "--batch-tokens", "20000"]
    command = ["simulate", *lengths, "--max-len", "16K", "--batches", "1", "--policies", "toy"]
    assert main(command) == 0
    assert "\ntoy " in capsys.readouterr().out
