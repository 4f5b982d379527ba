"""The oracle: every sample alone, whole, in one process, in float64, by the definition.

Inputs are drawn for the concatenated samples of a batch, in sample order; a rank takes its rows by
global token number, and its results are put back the same way, so rows are never compared by place.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_nsp.arrays import IntArray
from megatron_nsp.runtime.kernels import AttentionMask, AttentionState, SampleBounds, VarlenCall
from megatron_nsp.runtime.kernels.reference import ReferenceKernel
from megatron_nsp.runtime.kernels.sink import add_sink, sink_gradient


@dataclass(frozen=True)
class AttentionInputs:
    """q, k, v and the output's gradient of all samples, concatenated by sample number.

    Shapes: N tokens of the batch, H query heads, K key/value heads, D head dim.
    """

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


def attention_oracle(
    inputs: AttentionInputs,
    lengths: IntArray,
    mask: AttentionMask,
    sink_H: Tensor | None = None,
) -> dict[str, Tensor]:
    """`out`, `dq`, `dk`, `dv` of the whole batch in float64, and `dsink` if there are sinks."""
    kernel = ReferenceKernel()
    samples = SampleBounds(np.concatenate([[0], np.cumsum(lengths)]))
    q, k, v, dout = (
        x.double() for x in (inputs.q_NHD, inputs.k_NKD, inputs.v_NKD, inputs.dout_NHD)
    )
    call = VarlenCall(samples, mask)
    out, lse = kernel.forward(q, k, v, call)
    if sink_H is not None:
        out, lse = add_sink(out, lse, sink_H.double())
    dq, dk, dv = kernel.backward(dout, AttentionState(q, k, v, out, lse), call)
    results = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    if sink_H is not None:
        results["dsink"] = sink_gradient(dout, out, lse, sink_H.double())
    return results


def relative_errors(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Norm of each difference over the norm of what is expected.

    A gradient that is zero by definition (dq and dk of a one-token sample) is held against a
    thousandth of the largest expected norm instead of against rounding noise.
    """
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    floor = 1e-3 * max(norms.values())
    errors = {}
    for name, tensor in expected.items():
        difference = float((values[name].double() - tensor.double()).norm())
        errors[name] = difference / max(norms[name], floor) if difference else 0.0
    return errors
