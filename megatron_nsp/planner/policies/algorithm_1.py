"""Algorithm 1 of the NSP paper, to the letter: the yardstick for our own search.

Arxiv 2609.22755, section 4.1.3. A beam over the k longest samples: every kept state is extended by
the next sample on every node that the token budget allows, and the w states with the least max C
stay, where C is what a rank has to do in both passes. Each of them then takes the tail, longest
first, on the least loaded leaf; the state with the least max C in the end is the plan.

What the paper leaves open: k and w, and which of two equal states is kept (here the one found
first, nodes in the tree's order, roots first). Its effective leaf units are taken as the nodes of
the least degree at which every sample of the tail fits the token budget. Where it would overfill
the unit with the fewest tokens, the sample is left over: our token budget is hard.
"""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan.arrays import BoolArray, IntArray
from megatron_nsp.planner.search.placement import UNPLACED, MicroBatchState, Placement
from megatron_nsp.planner.search.problem import MicroBatchProblem


@dataclass(frozen=True)
class Algorithm1:
    """What the paper leaves to be set.

    Attributes:
        prefix_size: k, samples that the beam places.
        beam_width: w, states kept after each.
        is_monotone: a longer sample of the prefix never has a smaller degree.
        leaf_degree: least degree of the effective leaf units.
    """

    prefix_size: int = 16
    beam_width: int = 32
    is_monotone: bool = False
    leaf_degree: int = 1


_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class _Nodes:
    """All N nodes of the tree, roots first.

    Attributes:
        column: `[N]` column of the node's degree.
        index: `[N]` index among those of the degree.
        covers: `[N, P]` whether a rank belongs to it.
    """

    column: IntArray
    index: IntArray
    covers: BoolArray

    @classmethod
    def of(cls, problem: MicroBatchProblem) -> "_Nodes":
        counts = problem.tree.num_ranks // problem.degrees
        columns = range(len(counts) - 1, -1, -1)
        column = np.concatenate([np.full(counts[k], k) for k in columns])
        index = np.concatenate([np.arange(counts[k]) for k in columns])
        ranks = np.arange(problem.tree.num_ranks)
        covers = ranks[None, :] // problem.degrees[column][:, None] == index[:, None]
        return cls(column, index, covers)


@dataclass(frozen=True, eq=False)
class _States:
    """At most w partial plans of the same m samples: the beam Q.

    Attributes:
        load_ns: `[w, P]` C, what each rank has to do.
        tokens: `[w, P]` T, the tokens it holds, every sample's share rounded up.
        node: `[w, m]` the node of each sample; `UNPLACED` where no state had room.
        is_active: `[w, N]` whether a node holds samples.
    """

    load_ns: IntArray
    tokens: IntArray
    node: IntArray
    is_active: BoolArray


def place_algorithm_1(problem: MicroBatchProblem, rules: Algorithm1 | None = None) -> Placement:
    """The state of the beam with the least max C once the tail is placed.

    Raises:
        ValueError: the tree has no nodes of the leaf degree.
    """
    rules = rules or Algorithm1()
    if rules.leaf_degree not in problem.tree.degrees:
        raise ValueError(
            f"leaf degree {rules.leaf_degree} is not in the chain {list(problem.tree.degrees)}"
        )
    nodes, num_prefix = _Nodes.of(problem), min(rules.prefix_size, problem.num_samples)
    states = _States(
        load_ns=np.zeros((1, problem.tree.num_ranks), dtype=np.int64),
        tokens=np.zeros((1, problem.tree.num_ranks), dtype=np.int64),
        node=np.zeros((1, 0), dtype=np.int64),
        is_active=np.zeros((1, len(nodes.column)), dtype=bool),
    )
    for sample in range(num_prefix):
        states = _extended(problem, nodes, states, sample, rules)
    best: tuple[int, int, MicroBatchState] | None = None
    for node in states.node:
        state, num_left = _completed(problem, nodes, node, rules)
        key = num_left, int((state.fwd_ns + state.bwd_ns).max())
        if best is None or key < best[:2]:
            best = (*key, state)
    assert best is not None, "a beam never runs empty"
    return best[2].placement()


def _extended(
    problem: MicroBatchProblem, nodes: _Nodes, states: _States, sample: int, rules: Algorithm1
) -> _States:
    """The w best of all states extended by one sample; the same states if it fits nowhere."""
    latency_ns = np.where(states.is_active, 0, 2 * problem.latency_ns[nodes.column])
    added_ns = problem.total_ns[sample, nodes.column] + latency_ns
    need = -(-problem.lengths[sample] // problem.degrees)[nodes.column]
    key = np.maximum(
        states.load_ns.max(axis=1)[:, None], _fullest(problem, states.load_ns) + added_ns
    )
    if problem.token_budget is not None:
        is_over = _fullest(problem, states.tokens) + need > problem.token_budget
        key = np.where(is_over, _NEVER, key)
    if rules.is_monotone and sample:
        last = states.node[:, -1]
        most = np.where(last == UNPLACED, len(problem.degrees), nodes.column[last])
        key = np.where(nodes.column > most[:, None], _NEVER, key)
    order = np.argsort(key, axis=None, kind="stable")[: rules.beam_width]
    order = order[key.reshape(-1)[order] < _NEVER]
    if len(order) == 0:
        nowhere = np.full((len(states.node), 1), UNPLACED)
        return _States(
            states.load_ns, states.tokens, np.hstack([states.node, nowhere]), states.is_active
        )
    parent, node = np.divmod(order, len(nodes.column))
    is_active = states.is_active[parent]
    is_active[np.arange(len(order)), node] = True
    covers = nodes.covers[node]
    return _States(
        load_ns=states.load_ns[parent] + covers * added_ns[parent, node][:, None],
        tokens=states.tokens[parent] + covers * need[node][:, None],
        node=np.hstack([states.node[parent], node[:, None]]),
        is_active=is_active,
    )


def _fullest(problem: MicroBatchProblem, values: IntArray) -> IntArray:
    """`[w, N]` the largest of the ranks' values in each node, roots first."""
    by_degree = [
        values.reshape(len(values), -1, degree).max(axis=2)
        for degree in reversed(problem.tree.degrees)
    ]
    return np.concatenate(by_degree, axis=1)


def _completed(
    problem: MicroBatchProblem, nodes: _Nodes, node: IntArray, rules: Algorithm1
) -> tuple[MicroBatchState, int]:
    """A state with the tail on the leaf units, and how many samples are left over."""
    state, prefix = MicroBatchState(problem), np.flatnonzero(node != UNPLACED)
    column, index = nodes.column[node[prefix]], nodes.index[node[prefix]]
    for k in range(len(problem.degrees)):
        chosen = column == k
        if chosen.any():
            state.add(k, prefix[chosen], index[chosen])
    tail = np.arange(len(node), problem.num_samples)
    num_left = len(node) - len(prefix)
    if len(tail):
        unit = int(problem.fits_alone()[tail[0]].argmax())
        unit = max(unit, problem.tree.degrees.index(rules.leaf_degree))
        num_left += len(state.place_level(unit, tail))
    return state, num_left
