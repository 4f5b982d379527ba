"""Bytes that attention holds between forward and backward: counted as they lie in memory, and
predicted from the plan.

Counted are whole storages, each once: what autograd holds for backward (seen by saved-tensor
hooks) and what a batch saves for the recomputation of a layer. The output itself is left out, for
the next module holds it. A view counts as all that it keeps alive.
"""

import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_nsp.plan.heads import HeadShape
from megatron_nsp.plan.saving import (
    NOTHING_SAVED,
    SavedSamples,
    SavedSizes,
    mark_saved,
    saved_bytes,
    unrecomputed_bytes,
)
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.attention import Layer, NestedBatch, nested_attention
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels.base import lse_dtype
from megatron_nsp.testing.ranks import run_ranks
from megatron_nsp.testing.runtime import local_runtime
from megatron_nsp.testing.verify import DTYPES, AttentionCase
from tests.dist.test_backends import random_cases


class Held:
    """What autograd holds of one tensor, for as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """The tensors that autograd holds; those it let go are no longer there."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Held]] = []

        def pack(tensor: Tensor) -> Held:
            held = Held(tensor)
            self.held.append(weakref.ref(held))
            return held

        super().__init__(pack, lambda held: held.tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([held.tensor for ref in self.held if (held := ref()) is not None])


def storage_bytes(tensors: list[Tensor], but: list[Tensor]) -> int:
    """Bytes of the storages of tensors, each once, without those of others."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in but}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(size for place, size in sizes.items() if place not in left_out)


def saved_by(batch: NestedBatch) -> list[Tensor]:
    """The tensors that a batch has saved."""
    outputs = [saved for layer in batch.saved_outputs.values() for saved in layer.values()]
    return [x for saved in outputs for x in (saved.out_THV, saved.lse_hS)]


def leaves_of(case: AttentionCase, batch: NestedBatch) -> list[Tensor]:
    numbers = batch.layout.token_numbers(case.plan.lengths)
    rows = case.draw().rows(numbers, batch.layout.num_filler_tokens)[:3]
    sinks = case.sinks()
    leaves = [*rows] if sinks is None else [*rows, sinks]
    return [x.clone().requires_grad_() for x in leaves]


def count_and_predict(
    rank: int, case: AttentionCase, groups: NestedGroups, saved: SavedSamples | None, stays: bool
) -> tuple[int, int]:
    """Bytes held by one call, counted and predicted; `saved` None = without recomputation."""
    plan = case.plan
    batch = NestedBatch.build(
        plan, rank, 0, case.row_multiple, case.overlap, saved or NOTHING_SAVED
    )
    leaves = leaves_of(case, batch)
    runtime = local_runtime(groups, overlap=case.overlap)
    layer = Layer(1, is_training=True, output_stays=stays)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor | None = None) -> Tensor:
        return nested_attention(q, k, v, batch, case.mask, runtime, sink_H, layer)

    held = SavedTensors()
    with held:
        out = attend(*leaves) if saved is None else checkpoint(attend, *leaves, use_reentrant=True)
    counted = storage_bytes([*held, *saved_by(batch)], but=[out])
    dtype = DTYPES[case.dtype]
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    heads = HeadShape(case.num_heads, case.num_kv_heads, case.head_dim, value_dim)
    lse_bytes = lse_dtype(dtype).itemsize
    predicted = sum(x.nbytes for x in leaves[3:])
    if saved is None:
        predicted += sum(
            unrecomputed_bytes(part, heads, dtype.itemsize, lse_bytes)
            for part in batch.layout.slices
        )
    else:
        row_bytes = 0 if stays else case.num_heads * value_dim * dtype.itemsize
        output = SavedSizes(case.num_heads, row_bytes, lse_bytes, num_layers=1)
        predicted += sum(x.nbytes for x in leaves[:3])  # what the checkpoint holds
        predicted += int(saved_bytes(plan, saved, output)[rank])
    out.backward(torch.ones_like(out))
    assert not batch.saved_outputs and not list(held)
    return counted, predicted


def _count_all(rank: int, cases: list[AttentionCase]) -> list[tuple[str, tuple[int, int]]]:
    made: dict[SPTree, NestedGroups] = {}
    results, rng = [], random.Random(5)
    for case in cases:
        tree = case.plan.tree
        if tree not in made:
            made[tree] = NestedGroups.create(tree, [range(8)])
        sizes = SavedSizes(case.num_heads, case.num_heads * case.head_dim * 8, 8, 1)
        everything = mark_saved(case.plan, sizes, float("inf"))
        cut = mark_saved(case.plan, sizes, rng.random() * everything.rank_bytes)
        modes: dict[str, SavedSamples | None] = {
            "plain": None,
            "recomputed": NOTHING_SAVED,
            "saved": everything,
            "cut": cut,
        }
        for mode, saved in modes.items():
            for stays in (False, True):
                found = count_and_predict(rank, case, made[tree], saved, stays)
                results.append((mode, found))
    return results


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_bytes_held_until_backward_are_the_closed_form(dtype: str) -> None:
    cases = [case for case in random_cases(200) if case.plan.tree.num_ranks == 8][:40]
    assert len(cases) == 40
    cases = [AttentionCase(**{**vars(case), "dtype": dtype}) for case in cases]
    ranks = run_ranks(8, _count_all, cases, timeout_s=240)
    wrong = [
        (rank, mode, found)
        for rank, results in enumerate(ranks)
        for mode, found in results
        if found[0] != found[1]
    ]
    assert not wrong, wrong[:5]
    sums: dict[str, int] = {}
    for results in ranks:
        for mode, (counted, _) in results:
            sums[mode] = sums.get(mode, 0) + counted
    assert sums["recomputed"] < sums["cut"] < sums["saved"]
