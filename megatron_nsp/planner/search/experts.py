"""Expert parallelism: ranks of one expert-parallel group share the work of their tokens' experts.

A token's experts may be on any rank of the group, so each of its ranks does an equal part of the
experts' work for all tokens of the group, whoever holds them; the ranks wait for one another before
it. With the group's ranks r and its E-th part of the experts' work,

    time of the group = max over r of (attention and own dense work of r) + experts / E

What must be even inside a group is therefore everything but the experts. The search spreads work as
if a rank did the experts of its own tokens, which makes groups equally busy; here the leaves inside
each group are dealt out anew, by all other work.

Groups are aligned blocks of E ranks, as nodes are; node i of degree d begins at rank i d:

    E = 4     group    0 0 0 0 | 1 1 1 1        node 3 of degree 2 is ranks 6 7,
              rank     0 1 2 3 | 4 5 6 7        in group 3 * 2 // 4 = 1
"""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.planner.search.placement import UNPLACED, MicroBatchState, Placement, exact_sums
from megatron_nsp.planner.search.problem import MicroBatchProblem
from megatron_nsp.planner.search.search import search

_CLOSE = 0.01
"""A load so close to the bound is left alone."""

_MOST_HANDED, _EVEN = 8, 5e-4
"""Samples handed on for each group, and the difference between groups that is left alone."""

_NEVER = np.iinfo(np.int64).max

_NUM_ROUNDS, _NUM_TRIED, _NUM_NODES = 8, 6, 2
"""Rounds of relief, samples of the busiest rank tried, and nodes of each degree."""


def search_with_experts(problem: MicroBatchProblem, placement: Placement) -> Placement:
    """The better of a placement of the search and of one that packs long samples with care.

    A long sample is mostly attention: it keeps a rank busy for longer than its own tokens' experts
    say, since the rank also does its part of the others'. So a second search packs the long samples
    by what a rank has time for beside an even part of all experts' work.
    """
    if not problem.shares_experts.any() or not problem.expert_ns.any():
        return placement
    careful = search(problem, _time_beside_experts_ns(problem))
    shared = [share_experts(problem, each) for each in (placement, careful)]
    best = min(shared, key=lambda each: (len(each.unplaced), shared_load_ns(problem, each)))
    if shared_load_ns(problem, best) <= (1 + _CLOSE) * problem.bound_ns:
        return best
    moved = share_experts(problem, relieve(problem, best))
    return min((best, moved), key=lambda each: shared_load_ns(problem, each))


def _time_beside_experts_ns(problem: MicroBatchProblem) -> IntArray:
    """`[n, K+1]` what fills a rank: all work, or work without experts in what they leave of it."""
    own_fwd_ns, own_bwd_ns = problem.own_ns
    even_ns = int(problem.expert_ns.sum()) / problem.tree.num_ranks
    scale = problem.bound_ns / max(problem.bound_ns - even_ns, 0.05 * problem.bound_ns)
    beside_ns = np.rint((own_fwd_ns + own_bwd_ns) * scale).astype(np.int64)
    return np.where(
        problem.shares_experts, np.maximum(beside_ns, problem.total_ns), problem.total_ns
    )


def share_experts(problem: MicroBatchProblem, placement: Placement) -> Placement:
    """The placement with leaves dealt out anew inside each group, if that is faster."""
    if not problem.shares_experts.any() or not problem.expert_ns.any():
        return placement
    tried = [placement, _deal(problem, placement), _deal(problem, _even_groups(problem, placement))]
    found = [each for each in tried if each is not None]
    return min(found, key=lambda each: shared_load_ns(problem, each))


def shared_load_ns(problem: MicroBatchProblem, placement: Placement) -> int:
    """Slowest forward plus slowest backward with the experts shared; node latency left out."""
    return _Loads.of(problem, placement).load_ns()


def _even_groups(problem: MicroBatchProblem, placement: Placement) -> Placement:
    """Leaves handed from the busiest group to the least busy one, until they are equally busy.

    A group is busy, in each pass, for the mean of its ranks, or for what one of them cannot pass
    on: nodes above the leaves, its longest sample. Its slower pass counts, measured by the share
    that the pass has of all work: groups that wait for others in one pass are not done in both.
    """
    group, num_groups = problem.expert_degree, problem.tree.num_ranks // problem.expert_degree
    own, work = np.array(problem.own_ns)[:, :, 0], problem.expert_ns.T
    is_leaf = (placement.column == 0) & (placement.index != UNPLACED)
    leaves = np.flatnonzero(is_leaf)
    # What stays: nodes above the leaves. Leaves are handed on, with their own work and experts'.
    fixed = _Loads.of(
        problem, Placement(placement.column, np.where(is_leaf, UNPLACED, placement.index), 0)
    )
    fixed_own = fixed.own_ns.reshape(2, -1, group)
    most, total, shared = fixed_own.max(axis=2), fixed_own.sum(axis=2), fixed.group_ns
    group_of, leaf_own = placement.index[leaves] // group, own[:, leaves]
    moves = (leaf_own + work[:, leaves]) / group
    for which in range(2):
        total[which] += exact_sums(group_of, leaf_own[which], num_groups)
        shared[which] += exact_sums(group_of, work[which, leaves], num_groups)
    share = (total + shared).sum(axis=1, keepdims=True) / int((total + shared).sum())
    for _ in range(_MOST_HANDED * num_groups):
        longest = np.zeros((2, num_groups), dtype=np.int64)
        for which in range(2):
            np.maximum.at(longest[which], group_of, leaf_own[which])
        # Two ranks with nodes of 3 and 5 and leaves of 1 and 8 are busy for their mean, 17 / 2: it
        # is more than the 5 of one rank's nodes and the 8 of the longest leaf.
        pass_busy = (np.maximum(np.maximum(total / group, most), longest) + shared / group) / share
        busy = pass_busy.max(axis=0)
        high, low = int(busy.argmax()), int(busy.argmin())
        slower = int(pass_busy[:, high].argmax())
        gap = float(busy[high] - busy[low])
        own_leaves = np.flatnonzero(group_of == high)
        gained = moves[slower, own_leaves] / share[slower]
        fits = gained < gap
        if gap < _EVEN * busy[high] or not fits.any():
            break
        # Handing on g changes the gap to gap - 2 g: best is what comes closest to half of it.
        chosen = own_leaves[np.where(fits, np.abs(2 * gained - gap), np.inf).argmin()]
        for where, sign in ((high, -1), (low, 1)):
            total[:, where] += sign * leaf_own[:, chosen]
            shared[:, where] += sign * work[:, leaves[chosen]]
        group_of[chosen] = low
    index = placement.index.copy()
    index[leaves] = group_of * group  # any leaf of the group: they are dealt out anew
    return Placement(placement.column, index, 0)


def _deal(problem: MicroBatchProblem, placement: Placement) -> Placement | None:
    """Leaves dealt out inside their groups; None if the token budget has no room for some."""
    state, group = MicroBatchState(problem), problem.expert_degree
    own_fwd_ns, own_bwd_ns = problem.own_ns
    own = own_fwd_ns + own_bwd_ns
    load = np.zeros(problem.tree.num_ranks, dtype=np.int64)
    for k, degree in enumerate(problem.tree.degrees):
        samples = np.flatnonzero((placement.column == k) & (placement.index != UNPLACED))
        if k == 0 or len(samples) == 0:
            continue
        state.add(k, samples, placement.index[samples])
        num_nodes = problem.tree.num_ranks // degree
        load += np.repeat(exact_sums(placement.index[samples], own[samples, k], num_nodes), degree)
    at_leaf = np.flatnonzero((placement.column == 0) & (placement.index != UNPLACED))
    group_of = placement.index[at_leaf] // group
    # Samples by group, longest first in each; groups have no leaf in common, so one after another.
    at_leaf = at_leaf[np.argsort(group_of, kind="stable")]
    counts = np.bincount(group_of, minlength=problem.tree.num_ranks // group)
    leaves = np.concatenate(
        [
            state.choose_nodes(0, samples, load, own[samples, 0], range(first, first + group))
            for first, samples in zip(
                range(0, problem.tree.num_ranks, group),
                np.split(at_leaf, np.cumsum(counts)[:-1]),
                strict=True,
            )
        ]
    )
    if (leaves == UNPLACED).any():
        return None
    state.add(0, at_leaf, leaves)
    return state.placement()


@dataclass(eq=False)
class _Loads:
    """Loads of a placement with experts shared, in both passes.

    Attributes:
        own_ns: `[2, P]` everything but shared experts.
        group_ns: `[2, P / E]` the shared experts' work of each group.
    """

    problem: MicroBatchProblem
    own_ns: IntArray
    group_ns: IntArray

    @classmethod
    def of(cls, problem: MicroBatchProblem, placement: Placement) -> "_Loads":
        """The loads of a placement."""
        num_ranks, group = problem.tree.num_ranks, problem.expert_degree
        loads = np.zeros((2, num_ranks), dtype=np.int64)
        placed = np.flatnonzero(placement.index != UNPLACED)
        column, index = placement.column[placed], placement.index[placed]
        is_shared = problem.shares_experts[column]
        number = index[is_shared] * problem.degrees[column[is_shared]] // group
        groups = []
        for which, own in enumerate(problem.own_ns):
            for k, degree in enumerate(problem.tree.degrees):
                at = column == k
                sums = exact_sums(index[at], own[placed[at], k], num_ranks // degree)
                loads[which] += np.repeat(sums, degree)
            work = problem.expert_ns[placed[is_shared], which]
            groups.append(exact_sums(number, work, num_ranks // group))
        return cls(problem, loads, np.array(groups))

    def add(
        self, own: tuple[IntArray, IntArray], sample: int, k: int, node: int, sign: int
    ) -> None:
        """Books a sample on a node, or takes it out with `sign` -1."""
        degree, group = self.problem.tree.degrees[k], self.problem.expert_degree
        first = node * degree
        for which in range(2):
            self.own_ns[which, first : first + degree] += sign * own[which][sample, k]
            if self.problem.shares_experts[k]:
                work = sign * self.problem.expert_ns[sample, which]
                self.group_ns[which, first // group] += work

    def rank_ns(self) -> IntArray:
        """`[2, P]` time of each rank."""
        group = self.problem.expert_degree
        rank_ns: IntArray = self.own_ns + np.repeat(self.group_ns // group, group, axis=1)
        return rank_ns

    def load_ns(self) -> int:
        """Slowest forward plus slowest backward."""
        return int(self.rank_ns().max(axis=1).sum())


def relieve(problem: MicroBatchProblem, placement: Placement) -> Placement:
    """Moves samples off the busiest rank to nodes of any degree, while it helps."""
    loads, own = _Loads.of(problem, placement), problem.own_ns
    state = MicroBatchState.booked(problem, placement.column, placement.index)
    for _ in range(_NUM_ROUNDS):
        before_ns, rank_ns = loads.load_ns(), loads.rank_ns().sum(axis=0)
        rank = int(rank_ns.argmax())
        on_path = (state.index == rank // problem.degrees[state.column]) & (state.index >= 0)
        best: tuple[int, int, int, int] | None = None
        for sample in np.flatnonzero(on_path)[:_NUM_TRIED].tolist():
            here = int(state.column[sample]), int(state.index[sample])
            loads.add(own, sample, *here, -1)
            for k, degree in enumerate(problem.tree.degrees):
                fullest = rank_ns.reshape(-1, degree).max(axis=1)
                for node in np.argsort(fullest, kind="stable")[:_NUM_NODES].tolist():
                    loads.add(own, sample, k, node, 1)
                    found = (loads.load_ns(), sample, k, node)
                    loads.add(own, sample, k, node, -1)
                    if found[0] < before_ns and (best is None or found < best):
                        best = found
            loads.add(own, sample, *here, 1)
        if best is None:
            break
        _, sample, k, node = best
        here = int(state.column[sample]), int(state.index[sample])
        if not state.move(sample, k, node):
            break
        loads.add(own, sample, *here, -1)
        loads.add(own, sample, k, node, 1)
    return state.placement()
