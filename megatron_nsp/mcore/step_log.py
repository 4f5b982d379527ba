"""The line a run prints for every step, and the record of its plans."""

from typing import NamedTuple

from megatron_nsp.plan.backends import backend_choices
from megatron_nsp.plan.saving import NOTHING_SAVED
from megatron_nsp.steps.step_planner import PlannedStep


class ExposedStep(NamedTuple):
    """For how long compute of this rank was blocked on exchanges in a finished step.

    Attributes:
        number: steps of the run before it.
        exposed_ms: over all layers and passes, recomputation too; see `exposed.py`.
    """

    number: int
    exposed_ms: float

    def __str__(self) -> str:
        """As the log says it."""
        return f"exposed in step {self.number + 1}: {self.exposed_ms:.1f} ms"


def step_line(step: PlannedStep, before: ExposedStep | None = None) -> str:
    """One line on what a step holds and how it was planned, printed when it starts.

    Imbalance is the predicted time of the busiest rank over the mean rank.

    Args:
        step: the step.
        before: what was measured in the step before it.
    """
    batch = step.batch
    parts = [
        f"nsp step {step.number + 1}",
        f"samples: {step.num_samples}",
        f"tokens: {step.num_tokens}",
        f"targets: {step.num_targets}" + ("" if step.num_targets else " (no targets in this step)"),
        f"epoch: {batch.epoch + 1}, documents drawn: {batch.num_drawn}",
        f"predicted: {step.score.load_us / 1e3:.1f} ms",
        f"imbalance: {imbalance(step):.3f}",
        f"tokens per degree: {degree_shares(step)}",
        f"plan: {step.plan_ms:.1f} ms, waited {step.waited_ms:.1f} ms",
    ]
    if step.plan.splits:
        parts.append(f"nodes: {backend_counts(step)}")
    if step.saved is not NOTHING_SAVED:
        tokens = int(step.plan.lengths[step.saved.samples(step.plan)].sum())
        parts.append(f"saved: {tokens} tokens, at most {step.saved.rank_bytes / 1e6:.3f} MB a rank")
    if len(batch.over_long):
        parts.append(
            f"left out: {len(batch.over_long)} over-long ({batch.over_long_tokens} tokens: "
            f"documents {_some(batch.over_long.tolist())})"
        )
    if batch.num_empty:
        parts.append(f"left out: {batch.num_empty} empty")
    if len(step.plan.carried):
        parts.append(f"carried to the next step: {len(step.plan.carried)}")
    if before is not None:
        parts.append(str(before))
    return " | ".join(parts)


def imbalance(step: PlannedStep) -> float:
    """Predicted time of the busiest rank over the mean; 1 for a step without work."""
    load_us = step.score.rank_load_us
    mean_us = float(load_us.mean())
    return float(load_us.max()) / mean_us if mean_us else 1.0


def degree_shares(step: PlannedStep) -> str:
    """Share of the step's tokens at each degree, for example `1: 62%, 4: 38%`."""
    plan = step.plan
    runs = plan.micro_batch >= 0
    total = max(1, int(plan.lengths[runs].sum()))
    shares = []
    for degree in plan.tree.degrees:
        at_degree = runs & (plan.depth == plan.tree.depth_of(degree))
        if at_degree.any():
            shares.append(f"{degree}: {100 * int(plan.lengths[at_degree].sum()) / total:.0f}%")
    return ", ".join(shares) or "none"


def backend_counts(step: PlannedStep) -> str:
    """How many nodes above degree 1 each backend has, for example `ulysses: 3, ring: 1`."""
    plan, counts = step.plan, dict.fromkeys(backend_choices()[1:], 0)
    for micro_batch in range(plan.num_micro_batches):
        for node in plan.active_nodes(micro_batch):
            degree = plan.tree.degree(node)
            if degree > 1:
                counts[plan.split_of(node, micro_batch).label(degree)] += 1
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)


def _some(numbers: list[int], most: int = 3) -> str:
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
