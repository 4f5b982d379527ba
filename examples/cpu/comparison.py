"""Compares policies on the same batches, inside one run.

A run draws a batch, plans it and goes on to the next, so it never sees a batch twice. Here a corpus
is written in which every batch comes once for each policy, one right after the other, together with
the plans for it: `--nsp-policy file:PATH` replays them. Noise of the machine then hits all policies
alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from build_corpus import write_documents
from training_run import train

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.node_cost import ulysses_sent_bytes
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import Plan
from megatron_nsp.planner import plan_batch
from megatron_nsp.steps.draw import document_order
from megatron_nsp.steps.sampler import Batch

NESTED = "auto"


@dataclass(frozen=True)
class Turn:
    """One step of the comparison: a batch under a policy."""

    batch: int
    policy: str
    plan: Plan


@dataclass(frozen=True)
class Row:
    """A policy's medians over the batches.

    Attributes:
        policy: its name.
        predicted_ms: time of a step in the cost model.
        busiest_ms: CPU time of the busiest rank.
        wall_ms: time of a step.
        rank_tokens: tokens on the fullest rank.
        sent_mb: megabytes all ranks send in attention.
    """

    policy: str
    predicted_ms: float
    busiest_ms: float
    wall_ms: float
    rank_tokens: float
    sent_mb: float


def plan_turns(batches: Sequence[Batch], cost: CostModel) -> list[Turn]:
    """The steps in their order: each batch under every policy, another policy first each time."""
    policies = [NESTED, *(f"static-{degree}" for degree in reversed(cost.tree.degrees))]
    turns = []
    for number, batch in enumerate(batches):
        start = number % len(policies)
        for policy in policies[start:] + policies[:start]:
            plan = plan_batch(batch.lengths, cost.tree, cost, policy=policy).plan
            turns.append(Turn(number, policy, plan))
    return turns


def write_turns(
    folder: Path,
    corpus: Path,
    lengths: IntArray,
    batches: Sequence[Batch],
    turns: list[Turn],
    seed: int,
) -> tuple[Path, Path]:
    """Writes the corpus of the comparison and its plans; returns the prefix and the file.

    Args:
        folder: where to write.
        corpus: prefix of the corpus the batches come from.
        lengths: `[documents]` tokens of its documents.
        batches: the batches.
        turns: the steps.
        seed: seed of the run; it shuffles the documents, so they are written accordingly.
    """
    tokens = np.fromfile(f"{corpus}.bin", dtype=np.uint8)
    ends = np.cumsum(lengths)
    drawn = np.concatenate([batches[turn.batch].documents for turn in turns])
    stored = np.empty_like(drawn)
    stored[document_order(len(drawn), seed, 0)] = drawn  # drawn one by one in just this order
    prefix, plans = folder / "comparison", folder / "comparison-plans.jsonl"
    write_documents(prefix, (tokens[ends[d] - lengths[d] : ends[d]] for d in stored))
    plans.write_text("".join(turn.plan.to_json() + "\n" for turn in turns))
    return prefix, plans


def sent_bytes(plan: Plan, cost: CostModel) -> float:
    """Bytes that all ranks together send in the attention of a step."""
    total = 0.0
    for node in plan.active_nodes():
        degree, tokens = plan.tree.degree(node), float(plan.lengths[plan.samples_of(node)].sum())
        for pass_ in Pass:
            for phase in Phase:
                total += degree * ulysses_sent_bytes(
                    pass_, phase, tokens / degree, tokens, degree, cost.shape
                )
    return total * cost.shape.num_layers


def compare(log: Path, prefix: Path, plans: Path, turns: list[Turn], cost: CostModel) -> list[Row]:
    """Runs the steps and returns a row for each policy; the first batch only warms up.

    Raises:
        RunFailedError: the run failed.
    """
    flags = ("--nsp-policy", f"file:{plans.resolve()}", "--train-iters", str(len(turns)))
    steps = list(train(log, prefix, *flags))
    measured = [(t, s) for t, s in zip(turns, steps, strict=True) if t.batch > 0]
    rows = []
    for policy in dict.fromkeys(turn.policy for turn in turns):
        own = [(turn.plan, step) for turn, step in measured if turn.policy == policy]
        rows.append(
            Row(
                policy=policy,
                predicted_ms=median(cost.score(plan).load_us / 1e3 for plan, _ in own),
                busiest_ms=median(step.busiest_ms for _, step in own),
                wall_ms=median(step.wall_ms for _, step in own),
                rank_tokens=median(int(plan.token_load().max()) for plan, _ in own),
                sent_mb=median(sent_bytes(plan, cost) / 1e6 for plan, _ in own),
            )
        )
    return rows
