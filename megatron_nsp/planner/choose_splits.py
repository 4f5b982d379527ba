"""How each node of a finished plan is split: the cheapest way for its own samples.

Every policy places samples and passes through here at the end, so degrees that heads cannot serve
get a split whatever policy chose them. A ring deals samples in chunks, whose rounding can put a few
tokens more on a rank than even slices would: where that breaks the token budget, a node takes its
next cheapest split that does not.
"""

from dataclasses import replace

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.score import node_numbers
from megatron_nsp.plan.arrays import FloatArray
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.split import ULYSSES, Split, rank_tokens
from megatron_nsp.plan.tree import Node

NodeSplits = dict[tuple[int, Node], tuple[Split, ...]]
"""The splits of each node, cheapest first."""


def with_cheapest_splits(plan: Plan, cost: CostModel) -> Plan:
    """The plan with every active node split in the way that takes its ranks the least time.

    Of equal ways the first is taken, Ulysses if it is there. The plan keeps its token budget where
    some choice of splits does.

    Args:
        plan: the plan; what it says of splits is ignored.
        cost: the cost model.
    """
    if cost.is_ulysses:
        return replace(plan, splits={})
    ranked = _ranked_splits(plan, cost)
    chosen = replace(plan, splits={key: splits[0] for key, splits in ranked.items()})
    if chosen.over_budget_tokens():
        chosen = replace(plan, splits=_within_budget(chosen, ranked))
    return chosen


def _ranked_splits(plan: Plan, cost: CostModel) -> NodeSplits:
    tree, is_saved = plan.tree, cost.is_saved(plan.lengths)
    placed = np.flatnonzero(plan.micro_batch != CARRIED)
    column = tree.column_of_depth(plan.depth[placed])
    ranked: NodeSplits = {}
    for k, degree in enumerate(tree.degrees):
        splits, rows = cost.splits[k], placed[column == k]
        if splits == (ULYSSES,) or not len(rows):
            continue
        place = plan.index[rows], plan.micro_batch[rows]
        numbers, size = node_numbers(tree, np.full(len(rows), k), *place, plan.num_micro_batches)
        times: list[FloatArray] = []
        for split in splits:
            how = cost.of(degree, split)
            both_us = cost.attention_us(how, plan.lengths[rows], is_saved[rows, k], numbers, size)
            times.append(both_us[0] + both_us[1] + 2.0 * how.latency_us)
        order = np.argsort(np.array(times), axis=0, kind="stable")
        for number, row in zip(*np.unique(numbers, return_index=True), strict=True):
            node = plan.node_of(int(rows[row]))
            key = int(plan.micro_batch[rows[row]]), node
            ranked[key] = tuple(splits[int(i)] for i in order[:, number])
    return ranked


def _within_budget(plan: Plan, ranked: NodeSplits) -> dict[tuple[int, Node], Split]:
    """Splits by which no rank holds more than the budget, or little more, node by node."""
    assert plan.token_budget is not None
    splits = dict(plan.splits)
    for micro_batch in range(plan.num_micro_batches):
        load = plan.token_load(micro_batch)
        for (number, node), ways in sorted(ranked.items()):
            ranks = plan.tree.ranks(node)
            own = load[ranks.start : ranks.stop]
            if number != micro_batch or own.max() <= plan.token_budget:
                continue
            lengths = plan.lengths[plan.samples_of(node, micro_batch)]
            held = rank_tokens(lengths, len(ranks), plan.split_of(node, micro_batch))
            most = [int((own - held + rank_tokens(lengths, len(ranks), way)).max()) for way in ways]
            fits = [i for i, tokens in enumerate(most) if tokens <= plan.token_budget]
            best = fits[0] if fits else int(np.argmin(most))
            own += rank_tokens(lengths, len(ranks), ways[best]) - held
            splits[micro_batch, node] = ways[best]
    return splits
