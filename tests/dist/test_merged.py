"""Parts of the keys are put together right however large scores are: against NumPy in float64, and
on gloo ranks against the oracle. Case M17 of the case list.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import ULYSSES, Split
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.backends.blocks import Rows
from megatron_nsp.runtime.backends.merged import Merged
from megatron_nsp.runtime.kernels import AttentionMask, SampleBounds, VarlenCall
from megatron_nsp.runtime.kernels.reference import ReferenceKernel
from megatron_nsp.runtime.kernels.sink import add_sink, sink_gradient
from megatron_nsp.testing.oracle import AttentionInputs
from megatron_nsp.testing.verify import AttentionCase, check_cases

ROWS, NUM_HEADS, DIM = 67, 2, 8
ALL = Rows(None, ROWS)
DTYPES = (torch.float32, torch.float64)
NO_KEYS = float("-inf")

Part = tuple[Tensor, Tensor]


def draw_parts(count: int, around: float, dtype: torch.dtype) -> list[Part]:
    """Output and LSE of parts of the keys, whose weights differ by up to some thousands."""
    generator = torch.Generator().manual_seed(count)
    outs = torch.randn(count, ROWS, NUM_HEADS, DIM, generator=generator, dtype=torch.float64)
    lses = around + 4 * torch.randn(count, NUM_HEADS, ROWS, generator=generator).double()
    return [(out.to(dtype), lse.to(dtype)) for out, lse in zip(outs, lses, strict=True)]


def exact(parts: list[Part]) -> tuple[np.ndarray, np.ndarray]:
    """The same in NumPy; at least one part of each row has keys."""
    outs = np.stack([out.double().numpy() for out, _ in parts])
    lses = np.stack([lse.double().numpy() for _, lse in parts])
    weights = np.exp(lses - lses.max(axis=0))
    lse = lses.max(axis=0) + np.log(weights.sum(axis=0))
    weights = (weights / weights.sum(axis=0)).transpose(0, 2, 1)[..., None]
    return (outs * weights).sum(axis=0), lse


def merged(parts: list[Part], rows: Rows = ALL) -> Merged:
    whole = Merged(torch.empty(ROWS, NUM_HEADS, 4, dtype=parts[0][0].dtype), DIM)
    for part in parts:
        whole.merge(rows, *part)
    return whole


def check(found: Part, expected: tuple[np.ndarray, np.ndarray], rounding: float) -> None:
    """Outputs are of size 1; an LSE is rounded where it is."""
    np.testing.assert_allclose(found[0].double().numpy(), expected[0], rtol=0, atol=16 * rounding)
    np.testing.assert_allclose(
        found[1].double().numpy(), expected[1], rtol=2 * rounding, atol=8 * rounding
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", [0.0, -5000.0, 5000.0, 1e6])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_weighed_by_their_lse(count: int, around: float, dtype: torch.dtype) -> None:
    parts = draw_parts(count, around, dtype)
    check(merged(parts).result(), exact(parts), torch.finfo(dtype).eps)


def test_weights_add_up_to_one() -> None:
    """Of keys whose values are all 1 the output is 1."""
    ones = torch.ones(ROWS, NUM_HEADS, DIM)
    for lse in (0.0, 100.0, 1000.0, 5000.0, 20000.0):
        parts = [(ones, torch.full((NUM_HEADS, ROWS), x)) for x in (lse, lse - 7.3, lse - 0.4)]
        torch.testing.assert_close(merged(parts).result()[0], ones, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_parts_without_keys_change_no_bit(empty: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = draw_parts(3, 5000.0, dtype)
    nothing = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], NO_KEYS)
    with_empty = merged([nothing if i in empty else part for i, part in enumerate(parts)])
    without = merged([part for i, part in enumerate(parts) if i not in empty])
    assert all(map(torch.equal, with_empty.result(), without.result()))
    if len(empty) == 2:  # one part is itself
        (i,) = {0, 1, 2} - {*empty}
        assert all(map(torch.equal, with_empty.result(), parts[i]))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_rows_that_see_no_key_are_zeros(count: int) -> None:
    nothing = torch.zeros(ROWS, NUM_HEADS, DIM), torch.full((NUM_HEADS, ROWS), NO_KEYS)
    whole = Merged(nothing[0], DIM)
    for _ in range(count):
        whole.merge(ALL, *nothing)
    assert all(map(torch.equal, whole.result(), nothing))


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_the_larger_of_parts_far_apart_is_all(far: float) -> None:
    outs = [out for out, _ in draw_parts(2, 0.0, torch.float32)]
    lses = [torch.full((NUM_HEADS, ROWS), x) for x in (0.0, far)]
    whole = merged([*zip(outs, lses, strict=True)])
    assert all(map(torch.equal, whole.result(), (outs[far > 0], lses[far > 0])))


def test_some_rows_alone_are_merged() -> None:
    first, second = draw_parts(2, 5000.0, torch.float32)
    numbers = np.arange(0, ROWS, 3)
    whole = merged([first])
    whole.merge(Rows.of(numbers, ROWS), second[0][numbers], second[1][:, numbers])
    expected = [x.copy() for x in exact([first])]
    both = exact([first, second])
    expected[0][numbers], expected[1][:, numbers] = both[0][numbers], both[1][:, numbers]
    check(whole.result(), (expected[0], expected[1]), 2**-23)


def test_the_output_has_the_dtype_of_the_queries() -> None:
    parts = draw_parts(3, 5000.0, torch.float32)
    whole = Merged(torch.empty(ROWS, NUM_HEADS, 4, dtype=torch.bfloat16), DIM)
    for out, lse in parts:
        whole.merge(ALL, out.bfloat16(), lse)
    found, lse = whole.result()
    assert (found.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = exact([(out.bfloat16(), lse) for out, lse in parts])
    error = np.abs(found.double().numpy() - expected)
    assert (error <= 2**-8 * np.abs(expected) + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", [0.0, 5000.0, -5000.0])
def test_a_sink_is_a_part_with_values_of_zero(around: float, dtype: torch.dtype) -> None:
    ((out, lse),) = draw_parts(1, around, dtype)
    sink = around + torch.tensor([-3.0, 2.0], dtype=dtype)
    part = torch.zeros_like(out), sink.unsqueeze(1).expand_as(lse)
    check(add_sink(out, lse, sink), exact([(out, lse), part]), torch.finfo(dtype).eps)


def test_sinks_of_rows_that_see_no_key() -> None:
    out, lse = torch.zeros(ROWS, NUM_HEADS, DIM), torch.full((NUM_HEADS, ROWS), NO_KEYS)
    sink = torch.tensor([3.0, NO_KEYS])
    found, with_sink = add_sink(out, lse, sink)
    assert torch.equal(found, out)
    assert torch.equal(with_sink, sink.unsqueeze(1).expand_as(lse))
    assert torch.equal(sink_gradient(torch.ones_like(out), found, with_sink, sink), torch.zeros(2))


def test_the_definition_too_has_weights_that_add_up_to_one() -> None:
    """Its output of equal values, in float32 at scores of some thousands."""
    mask, ones = AttentionMask(1.0, is_causal=False), torch.ones(ROWS, NUM_HEADS, DIM)
    call = VarlenCall(SampleBounds(np.array([0, ROWS])), mask)
    torch.manual_seed(0)
    q, k = (40 * torch.randn(ROWS, NUM_HEADS, DIM) for _ in range(2))
    out, lse = ReferenceKernel().forward(q, k, ones, call)
    assert float(lse.max()) > 5000
    torch.testing.assert_close(out, ones, rtol=0, atol=1e-6)


SPLITS = (ULYSSES, Split(4), Split(2), Split(4, "gather"))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("seed", [0, 2])
def test_large_scores_cost_a_ring_no_more_than_heads_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int, has_sinks: bool
) -> None:
    """At scores of thousands float32 itself is off; dividing the keys must not add to it."""
    draw = AttentionInputs.draw

    def large(*args: object) -> AttentionInputs:
        drawn = draw(*args)  # type: ignore[arg-type]
        return AttentionInputs(40 * drawn.q_NHD, 40 * drawn.k_NKD, drawn.v_NKD, drawn.dout_NHD)

    monkeypatch.setattr(AttentionInputs, "draw", large)
    tree = SPTree(4, (1, 2, 4))
    root, half = tree.node(4, 0), tree.node(2, 1)

    def case(split: Split) -> AttentionCase:
        splits = {} if split == ULYSSES else {(0, root): split}
        plan = Plan.from_nodes(tree, [257, 64, 3, 1], [root, root, root, half], splits=splits)
        return AttentionCase(
            plan, 4, 4, 16, dtype="float32", seed=seed, row_multiple=4, has_sinks=has_sinks
        )

    drawn = case(ULYSSES).draw()
    assert float((drawn.q_NHD * drawn.k_NKD).sum(dim=2).max()) * 16**-0.5 > 1000
    alone, *others = check_cases([case(split) for split in SPLITS])
    for split, result in zip(SPLITS[1:], others, strict=True):
        for name in ("out", "dq", "dk", "dv"):
            assert result.errors[name] <= 2 * alone.errors[name], (split, name, result.errors)
