"""Runs a forced plan on local gloo ranks and compares it with the oracle.

The mechanism behind `megatron-nsp verify` and behind the attention tests.
"""

from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.heads import HeadShape
from megatron_nsp.plan.layout import NodeSlice, rank_layout
from megatron_nsp.plan.order import ALL_ROOT_FIRST, NodeOrders
from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.ring_rows import KeyMask
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples
from megatron_nsp.plan.schedule import build_schedule, communicates
from megatron_nsp.plan.traffic import sent_elements
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.runtime.attention import Layer, NestedBatch, nested_attention
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionMask
from megatron_nsp.testing.logging_group import CollectiveLog, Record, logged_new_group
from megatron_nsp.testing.oracle import AttentionInputs, Exact, attention_oracle
from megatron_nsp.testing.ranks import run_ranks
from megatron_nsp.testing.runtime import local_runtime

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 3e-2}


@dataclass(frozen=True)
class AttentionCase:
    """One forced plan and the attention to run on it.

    Attributes:
        plan: the plan.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: head dimension.
        dtype: a key of DTYPES.
        overlap: stream the phases.
        seed: seed of the inputs.
        row_multiple: buffers are filled to a multiple of this many rows.
        value_dim: head dimension of the values; None = `head_dim`.
        is_causal: whether the mask is causal.
        window_left: most tokens before itself that a token sees; None = all.
        has_sinks: whether every query head has an attention sink.
        saved: samples whose output is saved while the call is recomputed; None = the call is made
            once, without recomputation.
        orders: in which order each tree runs its nodes.
        kernel: the kernel, as --nsp-kernel calls it.
    """

    plan: Plan
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float64"
    overlap: bool = True
    seed: int = 0
    row_multiple: int = 1
    value_dim: int | None = None
    is_causal: bool = True
    window_left: int | None = None
    has_sinks: bool = False
    saved: SavedSamples | None = None
    orders: NodeOrders = ALL_ROOT_FIRST
    kernel: str = "auto"

    @property
    def mask(self) -> AttentionMask:
        """The mask, with the usual scale."""
        return AttentionMask(self.head_dim**-0.5, self.is_causal, self.window_left)

    def draw(self) -> AttentionInputs:
        """The case's inputs."""
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        num_tokens = int(self.plan.lengths.sum())
        dtype = DTYPES[self.dtype]
        return AttentionInputs.draw(num_tokens, *heads, dtype, self.seed, self.value_dim)

    def sinks(self) -> torch.Tensor | None:
        """`[num_heads]` the sinks, if there are some."""
        if not self.has_sinks:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        sinks = torch.randn(self.num_heads, generator=generator, dtype=torch.float64)
        return sinks.to(DTYPES[self.dtype])


@dataclass(frozen=True)
class RankResult:
    """What one rank computed and sent."""

    outputs: dict[str, torch.Tensor]
    records: tuple[Record, ...]
    max_in_flight: int


@dataclass(frozen=True)
class Place:
    """Where a tensor is off most.

    Attributes:
        rank: the rank that holds the row; None for the gradient of a sink, a sum over ranks.
        sample: number of the sample in the batch; None for a sink.
        row: the token's position in its sample, or the query head of a sink.
        found: the element that is off most.
        expected: what it should be.
    """

    rank: int | None
    sample: int | None
    row: int
    found: float
    expected: float

    def __str__(self) -> str:
        """The place in words."""
        where = f"head {self.row}"
        if self.sample is not None:
            where = f"token {self.row} of sample {self.sample}, on rank {self.rank}"
        return f"{where}: {self.found:.9g} instead of {self.expected:.9g}"


@dataclass(frozen=True)
class CaseResult:
    """Errors against the oracle and traffic against the prediction.

    Attributes:
        errors: largest relative error of out, dq, dk and dv.
        places: where each of them is off most.
        num_collectives: all-to-alls of each rank.
        predicted_collectives: the closed form: one for each step that communicates.
        sent_bytes: bytes each rank sent to others.
        predicted_bytes: the closed form.
        records: each rank's all-to-alls in order.
        max_in_flight: most collectives any rank had in flight at once.
    """

    errors: dict[str, float]
    places: dict[str, Place]
    num_collectives: list[int]
    predicted_collectives: list[int]
    sent_bytes: list[int]
    predicted_bytes: list[int]
    records: list[tuple[Record, ...]] = field(repr=False)
    max_in_flight: int = 0

    def is_right(self, tolerance: float) -> bool:
        """Whether errors are within tolerance and traffic is what was predicted."""
        return (
            all(error <= tolerance for error in self.errors.values())
            and self.num_collectives == self.predicted_collectives
            and self.sent_bytes == self.predicted_bytes
        )


def run_case(
    rank: int, case: AttentionCase, groups: NestedGroups, log: CollectiveLog
) -> RankResult:
    """Forward and backward of one case on one rank."""
    batch = NestedBatch.build(
        case.plan,
        rank,
        row_multiple=case.row_multiple,
        overlap=case.overlap,
        saved_samples=case.saved or NOTHING_SAVED,
        orders=case.orders.of_rank(0, case.plan.tree, rank),
    )
    layout = batch.layout
    numbers = layout.token_numbers(case.plan.lengths)
    q, k, v, dout = case.draw().rows(numbers, layout.num_filler_tokens)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    runtime = local_runtime(groups, case.kernel, overlap=case.overlap)
    sinks = case.sinks()
    if sinks is not None:
        leaves.append(sinks.requires_grad_())
    layer = None if case.saved is None else Layer(1, is_training=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor | None = None) -> Tensor:
        return nested_attention(q, k, v, batch, case.mask, runtime, sink_H, layer)

    log.clear()
    out = attend(*leaves) if layer is None else checkpoint(attend, *leaves, use_reentrant=True)
    out.backward(dout)
    assert not batch.saved_outputs, f"{len(batch.saved_outputs)} layers have outputs left"
    outputs = {"out": out.detach()}
    for name, leaf in zip(("dq", "dk", "dv", "dsink"), leaves, strict=False):
        assert leaf.grad is not None
        outputs[name] = leaf.grad
    return RankResult(outputs, tuple(log.records), log.max_in_flight)


def _rank_cases(rank: int, cases: list[AttentionCase]) -> list[RankResult | None]:
    """Every case on one rank; cases of smaller domains use the first ranks only."""
    results: list[RankResult | None] = []
    log, made = CollectiveLog(), {}
    for case in cases:
        tree = case.plan.tree
        if tree not in made:
            made[tree] = _groups_of_first_ranks(tree, rank, log)
        groups = made[tree]
        results.append(None if groups is None else run_case(rank, case, groups, log))
    return results


def _groups_of_first_ranks(tree: SPTree, rank: int, log: CollectiveLog) -> NestedGroups | None:
    world = torch.distributed.get_world_size()
    new_group = logged_new_group(log)
    if tree.num_ranks == world:
        return NestedGroups.create(tree, [range(world)], new_group)
    group_of = {}
    for node in tree.nodes():
        if tree.degree(node) > 1:
            group = new_group(list(tree.ranks(node)))
            if group is not None:
                group_of[node] = group
    return NestedGroups(tree, rank, len(group_of), group_of) if rank < tree.num_ranks else None


def predicted_traffic(case: AttentionCase) -> tuple[list[int], list[int]]:
    """Collectives and bytes of each rank, from the plan alone."""
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    heads = HeadShape(case.num_heads, case.num_kv_heads, case.head_dim, value_dim)
    mask = KeyMask(case.is_causal, case.window_left)
    num_collectives, sent_bytes = [], []
    for rank in range(case.plan.tree.num_ranks):
        count, elements = 0, 0
        for pass_, parts, num_saved in _passes_of(case, rank):
            splits = {part.node: part.split.under(mask) for part in parts}
            part_of = {part.node: part for part in parts}
            for step in build_schedule([*part_of], pass_, case.overlap, splits):
                part, split = part_of[step.node], splits[step.node]
                count += communicates(step, part.degree, split)
                elements += sent_elements(step, part, heads, mask, num_saved.get(step.node, 0))
        num_collectives.append(count)
        sent_bytes.append(elements * DTYPES[case.dtype].itemsize)
    return num_collectives, sent_bytes


def _passes_of(
    case: AttentionCase, rank: int
) -> list[tuple[Pass, list[NodeSlice], dict[Node, int]]]:
    """The passes of one attention call: what runs in each, and what backward gathers once more."""
    parts = list(rank_layout(case.plan, rank).slices)
    if case.saved is None:
        return [(Pass.FWD, parts, {}), (Pass.BWD, parts, {})]
    num_saved = {part.node: case.saved.of_node(0, part.node) for part in parts}
    again = [part.without_first(num_saved[part.node]) for part in parts]
    again = [part for part in again if len(part.samples)]
    return [(Pass.FWD, parts, {}), (Pass.FWD, again, {}), (Pass.BWD, parts, num_saved)]


def check_cases(cases: list[AttentionCase], timeout_s: float = 60.0) -> list[CaseResult]:
    """Runs cases on as many ranks as the largest needs and compares each with the oracle.

    Raises:
        RankError: a rank failed.
    """
    results = run_cases(cases, timeout_s)
    return [_compare(case, ranks) for case, ranks in zip(cases, results, strict=True)]


def run_cases(cases: list[AttentionCase], timeout_s: float = 60.0) -> list[list[RankResult]]:
    """What each rank computed and sent, case by case.

    Raises:
        RankError: a rank failed.
    """
    if any(case.saved is not None for case in cases):
        # The first call of `checkpoint` imports it: a second and a half, in each forked rank.
        import_module("torch._dynamo")
    num_ranks = max(case.plan.tree.num_ranks for case in cases)
    per_rank = run_ranks(num_ranks, _rank_cases, cases, timeout_s=timeout_s)
    return [
        [per_rank[rank][place] for rank in range(case.plan.tree.num_ranks)]
        for place, case in enumerate(cases)
    ]


def _compare(case: AttentionCase, ranks: list[RankResult]) -> CaseResult:
    exact = attention_oracle(case.draw(), case.plan.lengths, case.mask, case.sinks())
    gathered = {name: torch.full_like(x, float("nan")) for name, x in exact.values.items()}
    rank_of_token = np.full(int(case.plan.lengths.sum()), -1)
    if case.has_sinks:  # each rank has its part of a sum over ranks
        gathered["dsink"] = torch.stack(
            [result.outputs.pop("dsink").double() for result in ranks]
        ).sum(0)
    for rank, result in enumerate(ranks):
        layout = rank_layout(case.plan, rank)
        numbers = torch.from_numpy(layout.token_numbers(case.plan.lengths))
        rank_of_token[numbers] = rank
        for name, value in result.outputs.items():
            gathered[name][numbers] = value[: len(numbers)].double()
            assert not value[len(numbers) :].any(), f"filler rows of {name} on {rank=} are not 0"
    num_collectives, sent_bytes = predicted_traffic(case)
    return CaseResult(
        errors=exact.errors(gathered),
        places=worst_places(gathered, exact, case.plan.lengths, rank_of_token),
        num_collectives=[len(result.records) for result in ranks],
        predicted_collectives=num_collectives,
        sent_bytes=[sum(r.sent_bytes for r in result.records) for result in ranks],
        predicted_bytes=sent_bytes,
        records=[result.records for result in ranks],
        max_in_flight=max(result.max_in_flight for result in ranks),
    )


def worst_places(
    found: dict[str, Tensor], exact: Exact, lengths: IntArray, rank_of_token: IntArray
) -> dict[str, Place]:
    """Where each tensor differs most, a value that is no number before all others.

    Args:
        found: what the ranks computed, by name.
        exact: what is right.
        lengths: `[n]` tokens of each sample.
        rank_of_token: `[N]` the rank that holds each token of the batch.
    """
    stops, places = np.cumsum(lengths), {}
    for name, expected in exact.values.items():
        difference = (found[name] - expected).abs().nan_to_num(nan=float("inf"))
        at = np.unravel_index(int(difference.argmax()), expected.shape)
        row, element = int(at[0]), tuple(int(place) for place in at)
        values = float(found[name][element]), float(expected[element])
        if name == "dsink":
            places[name] = Place(None, None, row, *values)
        else:
            sample = int(np.searchsorted(stops, row, side="right"))
            position = row - int(stops[sample] - lengths[sample])
            places[name] = Place(int(rank_of_token[row]), sample, position, *values)
    return places
