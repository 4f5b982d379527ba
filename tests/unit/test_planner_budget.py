"""Pure tests of the token budget in each part of the search: never one token over, all of it used.

The parts are tested by themselves: in a whole plan one of them makes up for another.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner import MicroBatchProblem, MicroBatchState, plan_batch
from megatron_nsp.planner.search.beam import beam
from megatron_nsp.planner.search.fill import fill_leaves, predicted_ns
from megatron_nsp.planner.search.prefix import PrefixPacker
from tests.unit.planner_cases import workstation

FOUR = workstation(4, (1, 2, 4))
EIGHT = workstation(8, (1, 2, 4, 8))
TREE = FOUR.tree
ANY_LOAD_NS = 10**15


def problem_of(
    lengths: list[int] | IntArray, budget: int, cost: CostModel = FOUR
) -> MicroBatchProblem:
    longest_first = np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()
    return MicroBatchProblem.from_times(cost.sample_times(longest_first), budget)


def tight_problems(count: int, multiple_of: int = 1) -> Iterator[MicroBatchProblem]:
    """Small samples that hold about as many tokens as the ranks may; none is too long alone."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        budget = int(rng.integers(3, 12))
        lengths = multiple_of * rng.integers(1, 4 * budget // multiple_of + 1, 40)
        total = int(rng.integers(3 * budget, 5 * budget))
        yield problem_of(lengths[np.cumsum(lengths) <= total], budget)


def recount(state: MicroBatchState) -> IntArray:
    """`[P]` tokens of each rank from the placed samples alone."""
    tokens = np.zeros(state.problem.tree.num_ranks, dtype=np.int64)
    for k, degree in enumerate(state.problem.tree.degrees):
        for node in range(len(tokens) // degree):
            held = (state.column == k) & (state.index == node)
            bounds = int(state.problem.lengths[held].sum()) * np.arange(degree + 1) // degree
            tokens[node * degree : (node + 1) * degree] += np.diff(bounds)
    return tokens


def fits_at(state: MicroBatchState, sample: int, k: int, node: int) -> bool:
    trial = state.copy()
    trial.add(k, np.array([sample]), np.array([node]))
    return bool(recount(trial).max() <= budget_of(state.problem))


def begun(problem: MicroBatchProblem, seed: int) -> MicroBatchState:
    """A state with about half of the samples on nodes drawn at random, within the budget."""
    rng, state = np.random.default_rng(seed), MicroBatchState(problem)
    for sample in np.flatnonzero(rng.random(problem.num_samples) < 0.5).tolist():
        k = int(rng.integers(len(problem.tree.degrees)))
        node = int(rng.integers(problem.tree.num_ranks // problem.tree.degrees[k]))
        if fits_at(state, sample, k, node):
            state.add(k, np.array([sample]), np.array([node]))
    return state


def budget_of(problem: MicroBatchProblem) -> int:
    assert problem.token_budget is not None
    return problem.token_budget


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_packing_and_beam_stay_within_the_budget_and_often_reach_it(multiple_of: int) -> None:
    fullest: dict[str, list[int]] = {"packed": [], "beam": []}
    for problem in tight_problems(300, multiple_of):
        places = PrefixPacker(problem, problem.total_ns).pack(ANY_LOAD_NS)
        packed = [] if places is None else [PrefixPacker(problem, problem.total_ns).state(places)]
        found = {"packed": packed, "beam": beam(problem, problem.num_samples, problem.bound_ns)}
        for part, states in found.items():
            for state in states:
                left = budget_of(problem) - recount(state).max()
                assert left >= 0, (part, problem.lengths, problem.token_budget)
                fullest[part].append(left)
    for part, lefts in fullest.items():
        assert lefts.count(0) > 50, part


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_level_takes_what_fits_and_leaves_what_does_not(k: int) -> None:
    num_left = 0
    for seed, problem in enumerate(tight_problems(400)):
        state = begun(problem, seed)
        left = state.place_level(k, np.flatnonzero(state.index < 0))
        assert sorted(left.tolist()) == np.flatnonzero(state.index < 0).tolist()
        assert recount(state).max() <= budget_of(problem)
        for sample in left.tolist():
            assert not any(fits_at(state, sample, k, i) for i in range(4 // TREE.degrees[k]))
        num_left += len(left)
    assert num_left > 20


def test_leftovers_go_anywhere_they_fit() -> None:
    num_left = 0
    for seed, problem in enumerate(tight_problems(400)):
        state = begun(problem, seed)
        left = state.place_anywhere(np.flatnonzero(state.index < 0))
        assert sorted(left.tolist()) == np.flatnonzero(state.index < 0).tolist()
        assert recount(state).max() <= budget_of(problem)
        nodes = [(k, i) for k, degree in enumerate(TREE.degrees) for i in range(4 // degree)]
        for sample in left.tolist():
            assert not any(fits_at(state, sample, k, node) for k, node in nodes)
        num_left += len(left)
    assert num_left > 20


def test_a_leftover_may_take_the_last_tokens_of_a_rank_whose_slice_does_not_grow() -> None:
    """A root stream of 3 tokens has slices 0 0 1 0 0 1 0 1; with 9 more 1 2 1 2 1 2 1 2."""
    problem = problem_of([9, 4, 4, 4, 4, 3, 3, 3, 3, 3], 5, EIGHT)
    state = MicroBatchState(problem)
    state.add(3, np.array([9]), np.array([0]))
    state.add(0, np.arange(1, 9), np.array([0, 2, 4, 6, 1, 3, 5, 7]))
    assert recount(state).tolist() == [4, 3, 5, 3, 4, 4, 4, 4]
    assert not len(state.place_anywhere(np.array([0])))
    assert recount(state).tolist() == [5] * 8


def test_a_move_may_use_up_the_budget_and_is_undone_where_it_breaks_it() -> None:
    state = MicroBatchState(problem_of([5, 4, 3, 2, 1], 5))
    state.add(0, np.arange(5), np.array([0, 1, 2, 3, 3]))
    for sample, node, may_move in ((3, 1, False), (4, 1, True), (4, 0, False), (3, 2, True)):
        before = state.copy()
        assert state.move(sample, 0, node) == may_move
        assert recount(state).max() <= 5
        if not may_move:
            assert recount(state).tolist() == recount(before).tolist()
            assert state.index.tolist() == before.index.tolist()
            assert state.fwd_ns.tolist() == before.fwd_ns.tolist()


def test_a_tail_goes_to_leaves_with_room_and_the_rest_is_handed_back() -> None:
    rng, num_left = np.random.default_rng(1), 0
    for seed, problem in enumerate(tight_problems(400)):
        # times of any mixture of forward and backward, so that either part of the fill has work
        fwd_ns, bwd_ns = rng.integers(1, 1000, (2, problem.num_samples, 3))
        problem = replace(problem, fwd_ns=fwd_ns, bwd_ns=bwd_ns, total_ns=fwd_ns + bwd_ns)
        state = begun(problem, seed)
        left = fill_leaves(state, np.flatnonzero(state.index < 0))
        assert sorted(left.tolist()) == np.flatnonzero(state.index < 0).tolist()
        assert recount(state).max() <= budget_of(problem)
        for sample in left.tolist():
            assert not any(fits_at(state, sample, 0, leaf) for leaf in range(4))
        num_left += len(left)
    assert num_left > 20


@pytest.mark.parametrize(("budget", "tokens_on_rank_0"), [(10, 10), (11, 7)])
def test_a_forecast_counts_on_the_room_that_ranks_have(budget: int, tokens_on_rank_0: int) -> None:
    """Ranks 1 to 3 hold 10 cheap tokens; ten dear ones are to come, of 1000 ns in each pass."""
    problem = problem_of([10, 10, 10, *[1] * 10], budget)
    fwd_ns = np.where(problem.lengths == 10, 1, 1000)[:, None].repeat(3, axis=1)
    none_ns = np.zeros(3, dtype=np.int64)
    dear = replace(problem, fwd_ns=fwd_ns, bwd_ns=fwd_ns, total_ns=2 * fwd_ns, latency_ns=none_ns)
    state = MicroBatchState(dear)
    state.add(0, np.arange(3), np.array([1, 2, 3]))
    expected_ns = 2000 * tokens_on_rank_0
    assert predicted_ns(state, np.arange(3, 13)) == pytest.approx(expected_ns, rel=0.01)


@pytest.mark.parametrize("budget", [6, 7])
def test_a_sample_may_fill_the_budget_of_a_degree_by_itself(budget: int) -> None:
    problem = problem_of(np.arange(1, 4 * budget + 1), budget)
    for row, length in zip(problem.fits_alone(), problem.lengths.tolist(), strict=True):
        assert row.tolist() == [-(-length // degree) <= budget for degree in TREE.degrees]


# Samples that all find a place, after which the fullest rank holds exactly the budget.
EXACT = {
    "four leaves": ([5, 5, 5, 5], 5),
    "two nodes of two": ([10, 10], 5),
    "the root": ([20], 5),
    "the root, share rounded up": ([18], 5),
    "one of each": ([8, 4, 3, 2, 2], 5),
    "leaves on top of the root": ([12, 2, 2, 2, 2], 5),
}


@pytest.mark.parametrize("name", EXACT)
def test_samples_that_fill_the_budget_exactly_are_placed(name: str) -> None:
    problem = problem_of(*EXACT[name])
    packer = PrefixPacker(problem, problem.total_ns)
    places = packer.pack(ANY_LOAD_NS)
    assert places is not None and recount(packer.state(places)).max() == problem.token_budget
    states = beam(problem, problem.num_samples, ANY_LOAD_NS)
    assert states and recount(states[0]).max() == problem.token_budget
    state = MicroBatchState(problem)
    assert not len(state.place_anywhere(np.arange(problem.num_samples)))
    assert recount(state).max() == problem.token_budget


@pytest.mark.parametrize(
    ("lengths", "num_micro_batches"), [([5, 5, 5, 3, 2], 1), ([5, 5, 5, 3, 3], 2)]
)
def test_a_micro_batch_is_opened_only_for_the_token_too_many(
    lengths: list[int], num_micro_batches: int
) -> None:
    result = plan_batch(lengths, TREE, FOUR, token_budget=5, num_micro_batches=4)
    assert result.report.num_micro_batches_used == num_micro_batches and not len(
        result.plan.carried
    )
