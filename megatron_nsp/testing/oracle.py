"""The oracle: every sample alone, whole, in one process, by the definition, in NumPy's float64.

Inputs are drawn for the concatenated samples of a batch, in sample order; a rank takes its rows by
global token number, and its results are put back the same way, so rows are never compared by place.

NumPy, and not torch, since what is judged is torch: one faulty vector routine of it, or one that is
off in the first call of a process with several threads, would otherwise be on both sides.

Shapes: N tokens of the batch, S tokens of one sample, H query heads, K key/value heads, D head dim
of queries and keys, V that of values and output.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_nsp.plan.arrays import FloatArray, IntArray
from megatron_nsp.runtime.kernels.base import AttentionMask


@dataclass(frozen=True)
class AttentionInputs:
    """q, k, v and the output's gradient of all samples, concatenated by sample number."""

    q_NHD: Tensor
    k_NKD: Tensor
    v_NKD: Tensor
    dout_NHD: Tensor

    @classmethod
    def draw(
        cls,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        seed: int,
        value_dim: int | None = None,
    ) -> "AttentionInputs":
        """Normal random inputs; the same for the same seed on every rank."""
        generator = torch.Generator().manual_seed(seed)
        heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
        value_dim = head_dim if value_dim is None else value_dim
        dims = (head_dim, head_dim, value_dim, value_dim)
        shapes = [(num_tokens, *shape) for shape in zip(heads, dims, strict=True)]
        return cls(
            *(
                torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
                for shape in shapes
            )
        )

    def rows(self, numbers: IntArray, num_filler: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows of one rank's buffer; filler rows hold ones."""
        index = torch.from_numpy(numbers)
        parts = (x[index] for x in (self.q_NHD, self.k_NKD, self.v_NKD, self.dout_NHD))
        filled = [torch.cat([x, x.new_ones(num_filler, *x.shape[1:])]) for x in parts]
        return filled[0], filled[1], filled[2], filled[3]


CANCELLED = 0.2
"""A value smaller than this share of its terms has cancelled."""


@dataclass(frozen=True)
class Exact:
    """What attention and its gradients are, and the scale of each that errors are held against.

    Attributes:
        values: `out`, `dq`, `dk`, `dv` of the whole batch in float64, and `dsink` if there are
            sinks.
        scales: by name, the norm of a value; where it has cancelled, `CANCELLED` times the root
            of the sum of the squares of the terms that its elements are sums of.

    Terms may cancel: dq and dk of a token that sees itself alone are zero by definition, the
    difference of two numbers that a kernel rounds. A norm of the value would then hold rounding
    against nothing. The terms cannot vanish unless the inputs do, and where their signs are random
    both norms are about the same: an error is held against the value unless that says nothing.
    """

    values: dict[str, Tensor]
    scales: dict[str, float]

    def errors(self, found: dict[str, Tensor]) -> dict[str, float]:
        """Norm of each difference over the scale of the value."""
        return relative_errors(found, self.values, self.scales)


def attention_oracle(
    inputs: AttentionInputs,
    lengths: IntArray,
    mask: AttentionMask,
    sink_H: Tensor | None = None,
) -> Exact:
    """Attention of the whole batch and its gradients, by the definition.

    For each sample: scores s = scale q k^T, masked; p = exp(s) over the sum of exp(s) and of
    exp(sink); out = p v. With row = sum(dout out) and ds = p (dout v^T - row) scale: dq = ds k,
    dk = ds^T q, dv = p^T dout, and dsink = -sum(p_sink row).
    """
    q, k, v, dout = (
        np.moveaxis(x.double().numpy(), 0, 1)  # heads first
        for x in (inputs.q_NHD, inputs.k_NKD, inputs.v_NKD, inputs.dout_NHD)
    )
    sinks = None if sink_H is None else sink_H.double().numpy()
    sums = {name: np.zeros(x.shape) for name, x in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}
    squares = {name: np.zeros(x.shape) for name, x in sums.items()}
    if sinks is not None:
        sums["dsink"], squares["dsink"] = np.zeros(len(q)), np.zeros(len(q))
    repeat = len(q) // len(k)
    stops = np.cumsum(lengths)
    for rows in map(slice, (stops - lengths).tolist(), stops.tolist()):
        for head in range(len(q)):
            key_head = head // repeat
            sink = None if sinks is None else float(sinks[head])
            terms = _attention_of_a_head(
                q[head, rows], k[key_head, rows], v[key_head, rows], dout[head, rows], mask, sink
            )
            for name, (total, square) in terms.items():
                at = key_head if name in ("dk", "dv") else head
                place = (at,) if name == "dsink" else (at, rows)
                sums[name][place] += total
                squares[name][place] += square
    values = {
        name: torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, 0, 1) if x.ndim > 1 else x))
        for name, x in sums.items()
    }
    scales = {
        name: max(
            float(np.linalg.norm(sums[name])), CANCELLED * float(np.sqrt(squares[name].sum()))
        )
        for name in sums
    }
    return Exact(values, scales)


def _attention_of_a_head(
    q_SD: FloatArray,
    k_SD: FloatArray,
    v_SV: FloatArray,
    dout_SV: FloatArray,
    mask: AttentionMask,
    sink: float | None,
) -> dict[str, tuple[FloatArray | np.float64, FloatArray | np.float64]]:
    """By name, the sums of one head of one sample, and the sums of their terms' squares."""
    scores = (q_SD @ k_SD.T) * mask.softmax_scale
    if mask.is_causal:
        before = np.arange(len(q_SD))[:, None] - np.arange(len(q_SD))
        hidden = before < 0
        if mask.window_left is not None:
            hidden |= before > mask.window_left
        scores[hidden] = -np.inf
    largest = scores.max(axis=1, keepdims=True)
    if sink is not None:
        largest = np.maximum(largest, sink)
    weights = np.exp(scores - largest)
    sink_weight = np.zeros_like(largest) if sink is None else np.exp(sink - largest)
    total = weights.sum(axis=1, keepdims=True) + sink_weight
    probs, sink_prob = weights / total, sink_weight / total
    out = probs @ v_SV
    dprobs = dout_SV @ v_SV.T
    row = (dout_SV * out).sum(axis=1, keepdims=True)
    dscores = probs * (dprobs - row) * mask.softmax_scale
    squared = np.square(probs)
    dsquared = squared * np.square((np.abs(dprobs) + np.abs(row)) * mask.softmax_scale)
    results: dict[str, tuple[FloatArray | np.float64, FloatArray | np.float64]] = {
        "out": (out, squared @ np.square(v_SV)),
        "dq": (dscores @ k_SD, dsquared @ np.square(k_SD)),
        "dk": (dscores.T @ q_SD, dsquared.T @ np.square(q_SD)),
        "dv": (probs.T @ dout_SV, squared.T @ np.square(dout_SV)),
    }
    if sink is not None:
        shares = sink_prob * row
        results["dsink"] = (-shares.sum(), np.square(shares).sum())
    return results


def relative_errors(
    values: dict[str, Tensor], expected: dict[str, Tensor], scales: dict[str, float] | None = None
) -> dict[str, float]:
    """Norm of each difference over its scale.

    Args:
        values: what was found.
        expected: what is right.
        scales: by name; without them the norms of what is expected, none of which may vanish.
    """
    errors = {}
    for name, tensor in expected.items():
        scale = float(tensor.double().norm()) if scales is None else scales[name]
        difference = float((values[name].double() - tensor.double()).norm())
        assert scale > 0 or not difference, f"{name} is zero and has no scale"
        errors[name] = difference / scale if difference else 0.0
    return errors
