"""The sizes of a model that decide what it costs."""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.plan.arrays import FloatArray
from megatron_nsp.plan.saving import SavedSizes


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its cost depends on, as one tensor-parallel rank sees them.

    Attributes:
        num_layers: transformer layers whose time adds up on a rank.
        hidden: width of the residual stream.
        num_heads: query heads (H).
        num_kv_heads: key/value heads (K).
        head_dim: elements of a head (D).
        dense_flops_per_token: forward flops of one layer's projections and MLP for one token.
        bytes_per_element: size of an element in an all-to-all.
        output_flops_per_token: forward flops of the output layer for one token.
        expert_flops_per_token: the part of `dense_flops_per_token` that experts do.
        expert_bytes_per_token: bytes one layer sends to the experts and back for one token.
        expert_degree: ranks of an expert-parallel group.
        stride: GPUs from one rank of the domain to the next: the tensor-parallel size.
        value_dim: elements of a head of values and output (V); 0 = `head_dim`.
        num_windowed_layers: layers with a sliding window.
        window_left: most tokens before itself that a token sees in such a layer.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_flops_per_token: float
    bytes_per_element: int = 2
    output_flops_per_token: float = 0.0
    expert_flops_per_token: float = 0.0
    expert_bytes_per_token: float = 0.0
    expert_degree: int = 1
    stride: int = 1
    value_dim: int = 0
    num_windowed_layers: int = 0
    window_left: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes no model has.

        Raises:
            ValueError: a size below 1, or query heads that do not divide over key/value heads.
        """
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide over {self.num_kv_heads} key/value "
                "heads"
            )

    @property
    def saved_sizes(self) -> SavedSizes:
        """What all layers save of a token: its output and its LSE."""
        return SavedSizes(
            num_heads=self.num_heads,
            row_bytes=self.num_heads * self.value_dim * self.bytes_per_element,
            lse_bytes=8 if self.bytes_per_element == 8 else 4,
            num_layers=self.num_layers,
        )

    def square_tokens(self, tokens: FloatArray) -> FloatArray:
        """Twice the pairs of tokens that see each other in a sample, on average over the layers.

        L^2 of a causal layer. With a window a token sees W = `window_left` + 1 at most: W (2L - W).
        """
        if not self.num_windowed_layers:
            return tokens * tokens
        seen = np.minimum(tokens, self.window_left + 1.0)
        share = self.num_windowed_layers / self.num_layers
        return (1.0 - share) * tokens * tokens + share * seen * (2.0 * tokens - seen)

    @classmethod
    def from_hidden(
        cls,
        num_layers: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bytes_per_element: int = 2,
        ffn_hidden: int | None = None,
    ) -> "ModelShape":
        """A shape whose dense work is that of an ordinary layer.

        Projections q, k, v and out: 2 hidden (2H + 2K) D flops a token. Gated MLP, three matrices:
        6 hidden ffn. Without `ffn_hidden` it is 3 hidden, the (active) width of the Qwen3 family:
        12288 for hidden 4096 (8B), 8 experts of 768 for hidden 2048 (30B-A3B).
        """
        ffn_hidden = 3 * hidden if ffn_hidden is None else ffn_hidden
        projections = 2 * hidden * (2 * num_heads + 2 * num_kv_heads) * head_dim
        return cls(
            num_layers=num_layers,
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dense_flops_per_token=float(projections + 6 * hidden * ffn_hidden),
            bytes_per_element=bytes_per_element,
        )
