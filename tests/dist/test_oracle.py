"""The yardstick itself: against plain sums, finite differences, and faults that it must see."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.kernels.base import AttentionMask
from megatron_nsp.testing.oracle import AttentionInputs, attention_oracle, relative_errors
from megatron_nsp.testing.verify import AttentionCase, check_cases, worst_places

LENGTHS = np.array([7, 1, 12])
MASKS = [
    AttentionMask(0.3),
    AttentionMask(0.3, is_causal=False),
    AttentionMask(0.3, window_left=3),
    AttentionMask(40.0),  # nearly all weight on one key
]


def draw(lengths: np.ndarray = LENGTHS) -> tuple[AttentionInputs, Tensor]:
    inputs = AttentionInputs.draw(int(lengths.sum()), 4, 2, 5, torch.float64, 3, value_dim=3)
    return inputs, torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)


def by_plain_sums(
    inputs: AttentionInputs, mask: AttentionMask, sink_H: Tensor | None
) -> dict[str, np.ndarray]:
    """The definition number by number; every sum of it is rounded once."""
    q, k, v, dout = (
        x.tolist() for x in (inputs.q_NHD, inputs.k_NKD, inputs.v_NKD, inputs.dout_NHD)
    )
    num_heads, num_kv_heads = len(q[0]), len(k[0])
    terms: dict[str, dict[tuple[int, ...], list[float]]] = {
        name: {} for name in ("out", "dq", "dk", "dv", "dsink")
    }

    def dot(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    def add(name: str, *place: int, value: float) -> None:
        terms[name].setdefault(place, []).append(value)

    stops = np.cumsum(LENGTHS).tolist()
    for stop, length in zip(stops, LENGTHS.tolist(), strict=True):
        for i in range(stop - length, stop):
            for head in range(num_heads):
                kv = head * num_kv_heads // num_heads
                seen = [
                    j
                    for j in range(stop - length, stop)
                    if not mask.is_causal
                    or (j <= i and (mask.window_left is None or i - j <= mask.window_left))
                ]
                scores = [mask.softmax_scale * dot(q[i][head], k[j][kv]) for j in seen]
                sink = None if sink_H is None else float(sink_H[head])
                most = max(scores + ([] if sink is None else [sink]))
                weights = [math.exp(score - most) for score in scores]
                rest = 0.0 if sink is None else math.exp(sink - most)
                total = math.fsum([*weights, rest])
                probs = [weight / total for weight in weights]
                out = [
                    math.fsum(p * v[j][kv][d] for p, j in zip(probs, seen, strict=True))
                    for d in range(len(v[0][0]))
                ]
                row = dot(dout[i][head], out)
                add("dsink", head, value=-rest / total * row)
                for d, value in enumerate(out):
                    add("out", i, head, d, value=value)
                for p, j in zip(probs, seen, strict=True):
                    ds = p * (dot(dout[i][head], v[j][kv]) - row) * mask.softmax_scale
                    for d in range(len(q[0][0])):
                        add("dq", i, head, d, value=ds * k[j][kv][d])
                        add("dk", j, kv, d, value=ds * q[i][head][d])
                    for d in range(len(v[0][0])):
                        add("dv", j, kv, d, value=p * dout[i][head][d])
    results = {}
    for name, places in terms.items():
        shape = tuple(max(place[axis] for place in places) + 1 for axis in range(len(min(places))))
        results[name] = np.zeros(shape)
        for place, values in places.items():
            results[name][place] = math.fsum(values)
    return results


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_oracle_is_the_definition(mask: AttentionMask, has_sinks: bool) -> None:
    inputs, sinks = draw()
    exact = attention_oracle(inputs, LENGTHS, mask, sinks if has_sinks else None)
    plain = by_plain_sums(inputs, mask, sinks if has_sinks else None)
    assert set(exact.values) == set(plain) - (set() if has_sinks else {"dsink"})
    for name, value in exact.values.items():
        # scores are rounded to 2^-53 of themselves, and exp turns that into as much of a weight
        atol = 1e-13 * max(1.0, mask.softmax_scale) ** 2
        np.testing.assert_allclose(value.numpy(), plain[name], rtol=0, atol=atol)


@pytest.mark.parametrize("mask", MASKS[:3])
def test_gradients_are_those_of_finite_differences(mask: AttentionMask) -> None:
    inputs, sinks = draw()
    exact = attention_oracle(inputs, LENGTHS, mask, sinks).values

    def loss(inputs: AttentionInputs, sinks: Tensor) -> float:
        out = attention_oracle(inputs, LENGTHS, mask, sinks).values["out"]
        return float((out * inputs.dout_NHD).sum())

    rng = np.random.default_rng(5)
    for field, name in (("q_NHD", "dq"), ("k_NKD", "dk"), ("v_NKD", "dv")):
        tensor = getattr(inputs, field)
        for place in zip(
            *(rng.integers(0, size, 6).tolist() for size in tensor.shape), strict=True
        ):
            step = torch.zeros_like(tensor)
            step[place] = 1e-5
            low, high = (
                loss(replace(inputs, **{field: x}), sinks) for x in (tensor - step, tensor + step)
            )
            assert (high - low) / 2e-5 == pytest.approx(float(exact[name][place]), abs=1e-8), name
    for head in range(4):
        step = torch.zeros_like(sinks)
        step[head] = 1e-5
        slope = (loss(inputs, sinks + step) - loss(inputs, sinks - step)) / 2e-5
        assert slope == pytest.approx(float(exact["dsink"][head]), abs=1e-8)


def test_a_gradient_that_vanishes_has_a_scale() -> None:
    """Rounding of dq and dk of one-token samples is small against what cancels in them."""
    lengths = np.ones(9, dtype=np.int64)
    exact = attention_oracle(draw(lengths)[0], lengths, AttentionMask(0.3))
    assert max(float(exact.values[name].norm()) for name in ("dq", "dk")) < 1e-14
    assert min(exact.scales.values()) > 1.0
    noise = {name: x + 1e-7 for name, x in exact.values.items()}
    errors = exact.errors(noise)
    assert 0 < errors["dq"] < 1e-6 and 0 < errors["dk"] < 1e-6


@pytest.mark.parametrize("lengths", [[300], [64, 32, 9, 1, 1], [9]])
def test_a_thousandth_too_much_is_found_where_nothing_vanishes(lengths: list[int]) -> None:
    """A value that has not cancelled is its own scale, so no fault is made light of."""
    exact = attention_oracle(draw(np.array(lengths))[0], np.array(lengths), AttentionMask(0.3))
    wrong = {name: x * 1.001 for name, x in exact.values.items()}
    errors = exact.errors(wrong)
    assert list(errors.values()) == pytest.approx([1e-3] * len(errors))


def test_swapped_rows_and_gradients_are_found() -> None:
    exact = attention_oracle(draw()[0], LENGTHS, AttentionMask(0.3))
    swapped = {name: x.clone() for name, x in exact.values.items()}
    swapped["dk"][[8, 9]] = swapped["dk"][[9, 8]]
    swapped["dv"] = swapped["dv"].flip(1)
    errors = exact.errors(swapped)
    assert errors["out"] == errors["dq"] == 0.0
    assert min(errors["dk"], errors["dv"]) > 0.1


def test_a_value_that_is_missing_is_no_small_error() -> None:
    exact = attention_oracle(draw()[0], LENGTHS, AttentionMask(0.3))
    values = {name: x.clone() for name, x in exact.values.items()}
    values["dq"][3, 1, 2] = float("nan")
    error = exact.errors(values)["dq"]
    assert not error <= 1e10


def test_errors_need_a_scale() -> None:
    zero = {"dq": torch.zeros(3)}
    assert relative_errors(zero, zero) == {"dq": 0.0}
    with pytest.raises(AssertionError, match="dq is zero and has no scale"):
        relative_errors({"dq": torch.ones(3)}, zero)


def test_the_place_that_is_off_most_is_named() -> None:
    inputs, sinks = draw()
    exact = attention_oracle(inputs, LENGTHS, AttentionMask(0.3), sinks)
    found = {name: x.clone() for name, x in exact.values.items()}
    found["dq"][9, 2, 1] += 1e-3  # samples of 7 and 1 tokens stand before
    found["dq"][2, 0, 0] -= 1e-4
    found["dv"][7, 1, 0] = float("nan")
    found["dsink"][3] += 1.0
    ranks = np.arange(LENGTHS.sum()) % 4
    places = worst_places(found, exact, LENGTHS, ranks)
    assert (places["dq"].sample, places["dq"].row, places["dq"].rank) == (2, 1, 1)
    assert places["dq"].found - places["dq"].expected == pytest.approx(1e-3)
    assert (places["dv"].sample, places["dv"].row, places["dv"].rank) == (1, 0, 3)
    assert str(places["dv"]).startswith("token 0 of sample 1, on rank 3: nan instead of ")
    assert str(places["dsink"]).startswith("head 3: ")


def test_a_case_of_one_token_samples_is_right_in_lower_precision() -> None:
    tree = SPTree(2, (1, 2))
    plan = Plan.from_nodes(tree, [1, 1, 1], [tree.node(1, 0), tree.node(1, 1), tree.node(2, 0)])
    cases = [AttentionCase(plan, 4, 2, 16, dtype=dtype) for dtype in ("float64", "float32")]
    for result, tolerance in zip(check_cases(cases), (1e-10, 1e-5), strict=True):
        assert result.is_right(tolerance), result.errors
