"""The page of a plan: tree, load and tokens of the ranks, the two queues, other degrees."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import Profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.report import svg
from megatron_nsp.simulator.active_paths import active_paths
from megatron_nsp.simulator.attention import Clocks, Event, run_attention
from megatron_nsp.simulator.order_search import choose_orders, orders_of_trees

_LEFT, _ROW = 70, 24
_MOST_RANKS_SHOWN = 16
_MOST_BARS = 128


def plan_page(data: Mapping[str, Any]) -> str:
    """The page.

    Args:
        data: what `megatron-nsp plan --json` prints.

    Raises:
        ValueError: it is something else.
    """
    try:
        plan = Plan.from_dict(data["plan"])
        cost = _cost_model(data["profile"], plan.tree)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"this is not what `megatron-nsp plan --json` prints: {type(error).__name__} {error}"
        ) from error
    sections = [("Summary", _summary(data, plan, cost))]
    for number in range(plan.num_micro_batches):
        name = f" of micro-batch {number}" if plan.num_micro_batches > 1 else ""
        sections += [
            (f"Nodes{name}", _nodes(plan, number)),
            (f"Load of the ranks{name}", _loads(plan, number, cost)),
            (f"Tokens of the ranks{name}", _tokens(plan, number)),
            (f"Queues in one layer{name}", _queues(plan, number, cost)),
        ]
    sections.append(("Other degrees", _other_degrees(plan, cost)))
    return svg.page("Plan of a batch", sections)


def _cost_model(constants: Mapping[str, Any], tree: SPTree) -> CostModel:
    """The cost model from the constants a plan was made with."""
    known = {entry.name for entry in fields(Profile)}
    profile = Profile.from_dict({k: v for k, v in constants.items() if k in known})
    shape = ModelShape(**constants["model"])
    settings = "backend", "recompute", "recompute_share", "save_tokens", "overlap"
    how = {name: constants[name] for name in settings}
    return CostModel(profile, shape, tree, **how)


def _summary(data: Mapping[str, Any], plan: Plan, cost: CostModel) -> str:
    kind = "an estimate" if cost.profile.is_estimate else "measured"
    step_us = max(data["step_us"], 1e-9)
    rows = [
        ("samples", f"{plan.num_samples:,}"),
        ("tokens", f"{int(plan.lengths.sum()):,}"),
        ("longest sample", f"{int(plan.lengths.max(initial=0)):,}"),
        ("ranks", f"{plan.tree.num_ranks}, degrees {', '.join(map(str, plan.tree.degrees))}"),
        ("profile", f"{cost.profile.name} ({kind})"),
        ("step", f"{data['step_us'] / 1e3:,.1f} ms, by {data['policy']}"),
        ("gap to the lower bound", f"{data['gap']:.4f}"),
        ("nodes above degree 1", _backends(plan)),
    ]
    rows += [
        (f"policy {name}", f"{load / 1e3:,.1f} ms, {load / step_us:.3f} times as long")
        for name, load in sorted(data["policies"].items(), key=lambda item: item[1])
    ]
    return svg.table(("", "predicted"), rows)


def _backends(plan: Plan) -> str:
    """How many nodes are split how."""
    counts = Counter(
        plan.backend_of(node, micro_batch)
        for micro_batch in range(plan.num_micro_batches)
        for node in plan.active_nodes(micro_batch)
        if plan.tree.degree(node) > 1
    )
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _width_of_ranks(plan: Plan) -> float:
    return (svg.WIDTH - _LEFT - 10) / plan.tree.num_ranks


def _nodes(plan: Plan, micro_batch: int) -> str:
    """Every active node over its ranks, shaded by the tokens that it puts on each."""
    tree, each = plan.tree, _width_of_ranks(plan)
    active = plan.active_nodes(micro_batch)
    tokens = {n: int(plan.lengths[plan.samples_of(n, micro_batch)].sum()) for n in active}
    most = max((tokens[n] / tree.degree(n) for n in active), default=1.0)
    parts = []
    for depth in range(tree.num_depths):
        degree = tree.degree_at(depth)
        parts.append(svg.text(0, depth * _ROW + 15, f"degree {degree}"))
        for index in range(tree.num_nodes(depth)):
            node = tree.node(degree, index)
            held = tokens.get(node, 0)
            title = f"node {tree.label(node)}: nothing"
            if held:
                samples = len(plan.samples_of(node, micro_batch))
                title = f"node {tree.label(node)}: {samples} samples, {held:,} tokens"
                title += f", {plan.backend_of(node, micro_batch)}" if degree > 1 else ""
            shade = 0.15 + 0.85 * held / degree / most if held else 0.06
            fill = svg.color(tree.degrees.index(degree)) if held else "#999"
            x, width = _LEFT + index * degree * each, degree * each - 1
            parts.append(svg.rect(x, depth * _ROW + 2, width, _ROW - 5, fill, title, shade))
    return svg.drawing(tree.num_depths * _ROW + 4, parts)


def _loads(plan: Plan, micro_batch: int, cost: CostModel) -> str:
    """Time of each rank, stacked by degree, in both passes."""
    tree = plan.tree
    by_degree = np.zeros((len(tree.degrees), tree.num_ranks))
    for k in range(len(tree.degrees)):
        is_here = (plan.micro_batch == micro_batch) & (plan.depth == tree.depth_of_column(k))
        alone = replace(plan, micro_batch=np.where(is_here, micro_batch, CARRIED))
        score = cost.score(alone)
        by_degree[k] = score.rank_load_us
    labels = [f"degree {degree}" for degree in tree.degrees]
    return _stacked(by_degree / 1e3, labels, "ms", None)


def _tokens(plan: Plan, micro_batch: int) -> str:
    """Tokens of each rank, with the budget."""
    held = plan.token_load(micro_batch)[None, :].astype(np.float64)
    budget = None if plan.token_budget is None else float(plan.token_budget)
    return _stacked(held, ["tokens"], "tokens", budget)


def _stacked(values: np.ndarray, labels: list[str], unit: str, limit: float | None) -> str:
    """Bars of the ranks, one upon another; several ranks share one where there are many."""
    num_ranks, height = values.shape[1], 160
    shared = -(-num_ranks // _MOST_BARS)
    shown = [  # the fullest of each run stands for it
        start + int(values[:, start : start + shared].sum(axis=0).argmax())
        for start in range(0, num_ranks, shared)
    ]
    values = values[:, shown]
    top = max(float(values.sum(axis=0).max(initial=0.0)), limit or 0.0, 1e-12)
    each = (svg.WIDTH - _LEFT - 10) / values.shape[1]
    parts = [
        svg.text(_LEFT - 6, 14, f"{top:,.4g}", "end"),
        svg.text(_LEFT - 6, 28, unit, "end"),
        svg.text(_LEFT - 6, height, "0", "end"),
    ]
    for bar, rank in enumerate(shown):
        y = float(height)
        for column in range(len(values)):
            tall = (height - 8) * float(values[column, bar]) / top
            y -= tall
            title = f"rank {rank}: {labels[column]} {values[column, bar]:,.1f} {unit}"
            x = _LEFT + bar * each
            parts.append(svg.rect(x, y, each - 0.5, tall, svg.color(column), title))
    if limit is not None:
        y = height - (height - 8) * limit / top
        parts.append(svg.line(_LEFT, y, svg.WIDTH - 10, y))
    return svg.drawing(height + 6, parts)


def _queues(plan: Plan, micro_batch: int, cost: CostModel) -> str:
    """Attention of one layer, forward and then backward, on both queues of some ranks."""
    tree = plan.tree
    orders = choose_orders(plan, cost)
    zeros = np.zeros(tree.num_ranks)
    clocks = Clocks(zeros.copy(), zeros.copy())
    events: list[Event] = []
    for pass_ in Pass:
        listed = orders_of_trees(orders, plan, micro_batch, pass_)
        paths = active_paths(plan, micro_batch, cost, listed)
        run_attention(paths, pass_, clocks, overlap=True, events=events)
    end_us = max(float(clocks.compute_us.max()), 1e-12)
    stride = -(-tree.num_ranks // _MOST_RANKS_SHOWN)
    shown = range(0, tree.num_ranks, stride)
    parts = []
    for row, rank in enumerate(shown):
        parts.append(svg.text(0, row * 30 + 16, f"rank {rank}"))
        for event in events:
            parts += _event(event, rank, row, end_us, tree)
    note = f"<p>{end_us / 1e3:,.2f} ms from left to right; of each rank compute above, exchanges "
    note += "below; simulated, with streaming.</p>"
    return note + svg.drawing(len(shown) * 30 + 4, parts)


def _event(event: Event, rank: int, row: int, end_us: float, tree: SPTree) -> Iterator[str]:
    """The event's rectangle on one rank, if it takes part."""
    start_us, stop_us = float(event.started_us[rank]), float(event.ended_us[rank])
    if not event.is_on[rank] or stop_us <= start_us:
        return
    degree = int(event.degree[rank])
    scale = (svg.WIDTH - _LEFT - 10) / end_us
    y = row * 30 + (4 if event.phase in (Phase.COMPUTE, Phase.NATIVE) else 17)
    title = f"{event.pass_.value} {event.phase.value} at degree {degree}: "
    title += f"{start_us:,.0f} to {stop_us:,.0f} us"
    fill = svg.color(tree.degrees.index(degree))
    yield svg.rect(_LEFT + start_us * scale, y, (stop_us - start_us) * scale, 11, fill, title)


def _other_degrees(plan: Plan, cost: CostModel) -> str:
    """The same samples with smaller largest degrees."""
    rows = []
    for count in range(1, len(plan.tree.degrees) + 1):
        tree = SPTree(plan.tree.num_ranks, plan.tree.degrees[:count])
        smaller = replace(cost, tree=tree)
        name = f"up to {tree.max_degree}"
        try:
            result = plan_batch(
                plan.lengths,
                tree,
                smaller,
                token_budget=plan.token_budget,
                num_micro_batches=None,
            )
        except ValueError as error:
            rows.append((name, f"not possible: {error}", ""))
            continue
        fullest = max(
            int(result.plan.token_load(number).max())
            for number in range(result.plan.num_micro_batches)
        )
        rows.append((name, f"{result.report.load_us / 1e3:,.1f} ms", f"{fullest:,}"))
    return svg.table(("degrees", "step, predicted", "tokens of the fullest rank"), rows)
