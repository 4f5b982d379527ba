"""Expert parallelism: ranks of one expert-parallel group share the work of their tokens' experts.

A token's experts may be on any rank of the group, so each of its ranks does an equal part of the
experts' work for all tokens of the group, whoever holds them; the ranks wait for one another before
it. With the group's ranks r and its E-th part of the experts' work,

    time of the group = max over r of (attention and own dense work of r) + experts / E

What must be even inside a group is therefore everything but the experts. The search spreads work as
if a rank did the experts of its own tokens, which makes groups equally busy; here the leaves inside
each group are dealt out anew, by all other work.
"""

import numpy as np

from megatron_nsp.plan import IntArray
from megatron_nsp.planner.placement import UNPLACED, PassState, Placement, exact_sums
from megatron_nsp.planner.problem import PassProblem


def share_experts(problem: PassProblem, placement: Placement) -> Placement:
    """The placement with leaves dealt out anew inside each group, if that is faster."""
    if not problem.shares_experts.any() or not problem.expert_ns.any():
        return placement
    before_ns = shared_load_ns(problem, placement)
    dealt = _deal(problem, placement)
    after_ns = None if dealt is None else shared_load_ns(problem, dealt)
    if dealt is None or after_ns is None or after_ns >= before_ns:
        return placement
    return dealt


def own_ns(problem: PassProblem) -> tuple[IntArray, IntArray]:
    """`[n, K+1]` forward and backward time without the experts where groups share them."""
    shared = np.where(problem.shares_experts, 1.0 / problem.degrees, 0.0)
    expert_ns = [
        np.rint(problem.expert_ns[:, which, None] * shared).astype(np.int64) for which in range(2)
    ]
    return problem.fwd_ns - expert_ns[0], problem.bwd_ns - expert_ns[1]


def shared_load_ns(problem: PassProblem, placement: Placement) -> int:
    """Slowest forward plus slowest backward with the experts shared; node latency left out."""
    placed = np.flatnonzero(placement.index != UNPLACED)
    column, index = placement.column[placed], placement.index[placed]
    total = 0
    for which, own in enumerate(own_ns(problem)):
        load = np.zeros(problem.tree.num_ranks, dtype=np.int64)
        for k, degree in enumerate(problem.tree.degrees):
            at = column == k
            sums = exact_sums(index[at], own[placed[at], k], problem.tree.num_ranks // degree)
            load += np.repeat(sums, degree)
        is_shared = problem.shares_experts[column]
        first_rank = index[is_shared] * problem.degrees[column[is_shared]]
        num_groups = problem.tree.num_ranks // problem.expert_degree
        work = problem.expert_ns[placed[is_shared], which]
        groups = exact_sums(first_rank // problem.expert_degree, work, num_groups)
        load += np.repeat(groups // problem.expert_degree, problem.expert_degree)
        total += int(load.max(initial=0))
    return total


def _deal(problem: PassProblem, placement: Placement) -> Placement | None:
    """Leaves dealt out inside their groups; None if the token budget has no room for some."""
    state, group = PassState(problem), problem.expert_degree
    own_fwd_ns, own_bwd_ns = own_ns(problem)
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
    for number in range(problem.tree.num_ranks // group):
        samples = at_leaf[group_of == number]
        leaves = range(number * group, (number + 1) * group)
        if len(state.place_level(0, samples, load, own[samples, 0], allowed=leaves)):
            return None
    return state.placement()
