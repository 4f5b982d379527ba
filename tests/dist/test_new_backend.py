"""A backend that the package does not have, added the way CONTRIBUTING says: one object, one class.

It sends all keys to all members, seen or not. Nothing else is told of it, and it is planned with,
priced, simulated, and right.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import override

import numpy as np
import pytest

from megatron_nsp.config import NSPConfig, build_tree
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.backend_gather import Gather
from megatron_nsp.plan.backends import BACKENDS, NodeHeads, backend_choices
from megatron_nsp.plan.chunks import Dealing
from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.ring_rows import KeyMask, gather_blocks
from megatron_nsp.plan.saving import SavedSamples
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.runtime.backends import MECHANISMS
from megatron_nsp.runtime.backends.blocks import Round, Rounds, Rows, kernel_calls, key_mask
from megatron_nsp.runtime.backends.gather import Gather as GatherKeys
from megatron_nsp.runtime.backends.node import HeadsAndKeys
from megatron_nsp.runtime.kernels import AttentionMask
from megatron_nsp.simulator.step import StepSettings, simulate_plan
from megatron_nsp.testing.random_plans import random_lengths, random_plan
from megatron_nsp.testing.verify import AttentionCase, check_cases


class Everything(Gather):
    """The numbers."""

    name = "everything"
    choices = ("everything",)

    @override
    def member_counts(self, heads: NodeHeads) -> Mapping[str, tuple[int, ...]]:
        return {self.name: (heads.fewest_members, heads.degree)}

    @override
    def keys_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        return (dealing.num_members - 1) * dealing.member_tokens[member]

    @override
    def gradients_sent(self, dealing: Dealing, member: int, number: int, mask: KeyMask) -> int:
        return sum(dealing.member_tokens) - dealing.member_tokens[member]


class EverythingKeys(GatherKeys):
    """The mechanism."""

    @staticmethod
    @override
    def rounds(part: NodeSlice, mask: AttentionMask) -> Rounds:
        held = part.member_tokens
        rows = [np.arange(tokens) for tokens in held]
        blocks = gather_blocks(part.dealing, part.member, rows, key_mask(mask))
        own = Rows(None, held[part.member])
        calls = kernel_calls(blocks, held[part.member], sum(held))
        return Round(), Round(calls, (own,) * len(held), held)


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(BACKENDS, Everything.name, Everything())
    monkeypatch.setitem(MECHANISMS, Everything.name, HeadsAndKeys(EverythingKeys))
    return Everything.name


SHAPE = ModelShape.from_hidden(4, 40, 5, 5, 8)
"""Five heads, which divide over no degree."""


def test_every_backend_has_a_mechanism() -> None:
    assert MECHANISMS.keys() == BACKENDS.keys()
    assert Everything.name not in backend_choices()


def test_a_new_backend_is_planned_with_priced_and_simulated(everything: str) -> None:
    config = NSPConfig(backend=everything)
    config.validate()
    tree = build_tree(config, 16, 5, 5)
    assert tree.degrees == (1, 2, 4, 8, 16)
    cost = CostModel(load_profile("h100-ib"), SHAPE, tree, config.backend)
    plan = plan_batch([90_000, 40_000, 700, 5], tree, cost).plan
    wide = [node for node in plan.active_nodes() if tree.degree(node) > 1]
    assert wide and all(plan.split_of(node).name == everything for node in wide)
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    # It moves what gathering moves of samples without a window, to as many others.
    gathered = {key: Split(split.num_members, "gather") for key, split in plan.splits.items()}
    gathering = dataclasses.replace(plan, splits=gathered)
    assert cost.score(plan).load_us == cost.score(gathering).load_us
    node = tree.node(16, 0)
    root = Plan.from_nodes(tree, [9600], [node], splits={(0, node): Split(16, everything)})
    found = simulate_plan(root, cost, StepSettings(overlap=True))
    assert found.step_us == pytest.approx(cost.score(root).load_us, rel=1e-9)


def test_a_new_backend_equals_the_oracle_and_sends_what_its_object_says(everything: str) -> None:
    rng, tree, cases = random.Random(8), SPTree(8, (1, 2, 4, 8)), []
    for seed in range(24):
        plan = random_plan(rng, tree, random_lengths(rng, 6, 60))
        splits = {
            (0, node): Split(tree.degree(node) // rng.choice((1, 1, 2)), everything)
            for node in plan.active_nodes()
            if tree.degree(node) > 2
        }
        saved = {(0, node): rng.randint(0, 1) for node in plan.active_nodes()}
        cases.append(
            AttentionCase(
                dataclasses.replace(plan, splits=splits),
                *(8, 4, 8),
                overlap=seed % 3 > 0,
                seed=seed,
                is_causal=seed % 4 > 0,
                window_left=5 if seed % 4 == 2 else None,
                has_sinks=seed % 5 == 0,
                saved=SavedSamples(saved) if seed % 2 else None,
            )
        )
    for case, result in zip(cases, check_cases(cases), strict=True):
        assert result.is_right(1e-10), (case, result)


def test_the_bytes_of_everything(everything: str) -> None:
    tree = SPTree(4, (1, 4))
    root, lengths = tree.node(4, 0), [37, 9, 1]
    plan = Plan.from_nodes(tree, lengths, [root] * 3, splits={(0, root): Split(4, everything)})
    (result,) = check_cases([AttentionCase(plan, 8, 4, 8, value_dim=6)])
    # Keys and values of 8 bytes go to three others, forward and backward; gradients come back.
    assert sum(result.sent_bytes) == 3 * 3 * sum(lengths) * 4 * (8 + 6) * 8
    assert result.is_right(1e-10)
