"""Recorded plans for the tests: every kind of placement, one after the other."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.mcore.data_paths import DataPath
from megatron_nsp.mcore.documents import IndexedDocuments
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.steps.sampler import Batch, BatchSampler, always

MakePlan = Callable[[SPTree, np.ndarray, random.Random], Plan]


def leaves(tree: SPTree, lengths: np.ndarray, rng: random.Random) -> Plan:
    """Every sample alone on a rank."""
    nodes = [tree.node(1, j % tree.num_ranks) for j in range(len(lengths))]
    return Plan.from_nodes(tree, lengths, nodes)


def root(tree: SPTree, lengths: np.ndarray, rng: random.Random) -> Plan:
    """Every sample over all ranks of a root."""
    roots = tree.num_nodes(0)
    nodes = [tree.node(tree.max_degree, j % roots) for j in range(len(lengths))]
    return Plan.from_nodes(tree, lengths, nodes)


def each_degree(tree: SPTree, lengths: np.ndarray, rng: random.Random) -> Plan:
    """Sample after sample on the first node of the next degree."""
    degrees = [tree.degrees[j % len(tree.degrees)] for j in range(len(lengths))]
    return Plan.from_nodes(tree, lengths, [tree.node(degree, 0) for degree in degrees])


def mixed(tree: SPTree, lengths: np.ndarray, rng: random.Random) -> Plan:
    """Every sample on a random node."""
    nodes = list(tree.nodes())
    return Plan.from_nodes(tree, lengths, [rng.choice(nodes) for _ in lengths])


def filler(tree: SPTree, lengths: np.ndarray, rng: random.Random) -> Plan:
    """Everything on the last rank; the others hold a filler token each."""
    return Plan.from_nodes(tree, lengths, [tree.node(1, tree.num_ranks - 1)] * len(lengths))


def planned(tree: SPTree, lengths: np.ndarray, rng: random.Random) -> Plan:
    """What the planner says for a machine on which communication is cheap."""
    shape = ModelShape.from_hidden(2, 64, 8, 2, 8, bytes_per_element=4)
    return plan_batch(lengths, tree, CostModel(load_profile("h100-ib"), shape, tree)).plan


EVERY_KIND: tuple[MakePlan, ...] = (leaves, root, mixed, planned, filler)


def batches(
    prefix: Path, count: int, batch_tokens: int, max_length: int = 512, seed: int = 7
) -> list[Batch]:
    """The batches a run with these flags draws."""
    lengths = IndexedDocuments(DataPath("--data-path", (str(prefix),))).lengths
    sampler = BatchSampler(lengths, always(batch_tokens), max_length, seed)
    return [sampler.draw() for _ in range(count)]


def record(
    path: Path, tree: SPTree, drawn: list[Batch], kinds: tuple[MakePlan, ...] = EVERY_KIND
) -> list[Plan]:
    """Writes one plan a batch, kind after kind, for `--nsp-policy file:PATH`."""
    rng = random.Random(0)
    plans = [
        kinds[place % len(kinds)](tree, batch.lengths, rng) for place, batch in enumerate(drawn)
    ]
    path.write_text("".join(plan.to_json() + "\n" for plan in plans))
    return plans
