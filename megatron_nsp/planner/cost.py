"""The cost model: what a sample costs at each degree, phase by phase (NSP paper, section 4.1.2).

Per layer and pass a node runs a prologue and an epilogue (all-to-all) and a compute phase. A sample
of L tokens at degree d, H query and K key/value heads of D elements, V of values, Kd = max(K // d,
1) and W = H/d D + Kd (D + V) of q, k and v:

    compute    L^2 H (D + V) / d flops forward (causal; less in layers with a window), 2.5 times
               that backward
    prologue   L/d (d-1) W elements sent forward (q, k, v), L/d (d-1) H/d V backward
    epilogue   (L - L/d) H/d V elements forward (the output), (L - L/d) W backward
    dense      L/d tokens of projections, MLP and output layer, backward twice the forward
    experts    L/d tokens to their experts and back, the same backward; a node smaller than the
               expert-parallel group shares this work with all of the group's ranks

All of them add up over the samples of a node, so a sample has one time per degree and pass. Times
are for the whole model and spread a node's tokens evenly: the floors of the real slices move at
most one token a rank, and every member of a node must predict the same.

An active node also costs each of its ranks a latency per layer, pass and phase: three phases, or
only the compute phase at degree 1, where nothing is exchanged.

A profile may hold one model's fitted times instead (`FittedModel`); then heads and flops play no
part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_nsp.config import is_admissible
from megatron_nsp.plan import IntArray, Plan
from megatron_nsp.planner.profile import ExchangeRate, FittedModel, Profile
from megatron_nsp.planner.score import FloatArray, PlanScore, SampleTimes
from megatron_nsp.schedule import Pass, Phase
from megatron_nsp.tree import SPTree

RECOMPUTE = ("none", "attention", "full")

BWD_ATTENTION_FACTOR = 2.5
"""Backward flops of flash attention over forward: five matrix products instead of two."""

BWD_DENSE_FACTOR = 2.0
"""Backward flops of a linear layer over forward: gradients of input and weight."""


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


def ulysses_sent_bytes[Tokens: (int, float)](
    pass_: Pass,
    phase: Phase,
    rank_tokens: Tokens,
    stream_tokens: Tokens,
    degree: int,
    shape: ModelShape,
) -> Tokens:
    """Bytes one rank of a Ulysses node sends to the others in one phase of one layer.

    Args:
        pass_: forward or backward.
        phase: prologue, compute or epilogue; compute sends nothing.
        rank_tokens: tokens of the stream that the rank holds (T).
        stream_tokens: tokens of the whole stream (S).
        degree: ranks of the node (d).
        shape: heads and element size.
    """
    own_heads = shape.num_heads // degree
    own_kv_heads = max(shape.num_kv_heads // degree, 1)
    out_width = own_heads * shape.value_dim
    qkv_width = own_heads * shape.head_dim + own_kv_heads * (shape.head_dim + shape.value_dim)
    width = {
        (Pass.FWD, Phase.PROLOGUE): qkv_width,  # q, k and v of all heads, to where they belong
        (Pass.FWD, Phase.EPILOGUE): out_width,  # the output of this rank's heads
        (Pass.BWD, Phase.PROLOGUE): out_width,  # the output's gradient
        (Pass.BWD, Phase.EPILOGUE): qkv_width,  # dq, dk and dv of this rank's heads
    }.get((pass_, phase), 0)
    if phase is Phase.PROLOGUE:
        return rank_tokens * ((degree - 1) * width * shape.bytes_per_element)
    return (stream_tokens - rank_tokens) * (width * shape.bytes_per_element)


def _share(fitted: FittedModel, pass_: Pass) -> float:
    return fitted.fwd_share if pass_ is Pass.FWD else 1.0 - fitted.fwd_share


SENT_BYTES: dict[str, Callable[[Pass, Phase, float, float, int, ModelShape], float]] = {
    "ulysses": ulysses_sent_bytes
}
"""Bytes formulas by backend name; the executor's backends carry the same names."""


@dataclass(frozen=True)
class CostModel:
    """Times of samples on the nodes of a tree.

    Attributes:
        profile: what the machine can do.
        shape: what the model needs.
        tree: the SP tree; its degrees are the columns of every `[n, K+1]` array, ascending.
        backend: the SP backend whose bytes are counted.
        recompute: what a backward pass runs again: 'none', 'attention' (with its exchanges), or
            'full' layers.
        save_tokens: tokens of a rank whose attention output is kept instead.

    Raises:
        ValueError: the backend or what is recomputed is unknown, or the backend cannot split the
            heads at a degree of the tree.
    """

    profile: Profile
    shape: ModelShape
    tree: SPTree
    backend: str = "ulysses"
    recompute: str = "none"
    save_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuses trees that the backend cannot serve."""
        if self.recompute not in RECOMPUTE:
            raise ValueError(
                f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute}"
            )
        if self.backend not in SENT_BYTES:
            raise ValueError(f"no SP backend {self.backend}, only {', '.join(SENT_BYTES)}")
        for degree in self.tree.degrees if self.profile.fitted is None else ():
            if not is_admissible(degree, self.shape.num_heads, self.shape.num_kv_heads):
                raise ValueError(
                    f"degree {degree} cannot split {self.shape.num_heads} query and "
                    f"{self.shape.num_kv_heads} key/value heads evenly"
                )

    @property
    def node_latency_us(self) -> FloatArray:
        """`[K+1]` what an active node adds to each of its ranks in one pass, all layers."""
        each_us = [
            sum(self.phase_latency_us(phase, degree) for phase in Phase)
            for degree in self.tree.degrees
        ]
        return self.shape.num_layers * np.array(each_us)

    def phase_latency_us(self, phase: Phase, degree: int) -> float:
        """What one phase of an active node costs beyond its work, in one layer."""
        if phase is Phase.COMPUTE:
            return self.profile.latency_us
        is_exchange = phase in (Phase.PROLOGUE, Phase.EPILOGUE)
        return self._rate(degree).latency_us if is_exchange and degree > 1 else 0.0

    def dense_us_per_token(self, pass_: Pass) -> float:
        """Time of one token outside attention: projections, MLPs, experts, output layer."""
        shape, fitted = self.shape, self.profile.fitted
        if fitted is not None:
            return _share(fitted, pass_) * fitted.linear_us
        flops = shape.num_layers * (shape.dense_flops_per_token - shape.expert_flops_per_token)
        flops += shape.output_flops_per_token
        factor = 1.0 if pass_ is Pass.FWD else BWD_DENSE_FACTOR
        own_us = factor * flops * 1e6 / self.profile.dense_flops_per_s
        return own_us + self.expert_us_per_token(pass_)

    def expert_us_per_token(self, pass_: Pass) -> float:
        """The part of it that experts take, with the exchanges there and back."""
        shape = self.shape
        factor = 1.0 if pass_ is Pass.FWD else BWD_DENSE_FACTOR
        each_us = factor * shape.expert_flops_per_token * 1e6 / self.profile.dense_flops_per_s
        if shape.expert_degree > 1:
            rate = self.profile.exchange_rate("experts", shape.expert_degree, shape.stride)
            each_us += shape.expert_bytes_per_token * 1e6 / rate.bytes_per_s
        return shape.num_layers * each_us

    def compute_us(self, lengths: IntArray, pass_: Pass) -> FloatArray:
        """`[n, K+1]` attention kernel time of each sample at each degree, all layers."""
        shape, fitted = self.shape, self.profile.fitted
        degrees = np.array(self.tree.degrees, dtype=np.float64)
        tokens = np.asarray(lengths, dtype=np.float64)[:, None]
        if fitted is not None:
            fitted_us = _share(fitted, pass_) * fitted.quadratic_us / degrees
            return tokens * tokens * fitted_us
        factor = 1.0 if pass_ is Pass.FWD else BWD_ATTENTION_FACTOR
        width = shape.head_dim + shape.value_dim
        flops_per_pair = factor * shape.num_heads * width * shape.num_layers
        rates = self.profile.attention_flops_per_s(lengths, pass_ is Pass.FWD)[:, None]
        return shape.square_tokens(tokens) * (flops_per_pair * 1e6 / rates / degrees)

    def exchange_us_per_token(self, pass_: Pass, phase: Phase) -> FloatArray:
        """`[K+1]` all-to-all time one token of a node's stream adds to each of its ranks."""
        times = [0.0]
        for degree in self.tree.degrees[1:]:
            sent = self._sent_bytes_per_token(pass_, phase, degree)
            times.append(sent * 1e6 / self._rate(degree).bytes_per_s)
        return np.array(times)

    def _sent_bytes_per_token(self, pass_: Pass, phase: Phase, degree: int) -> float:
        """Bytes of all layers that one token of a node's stream adds to each of its ranks."""
        fitted = self.profile.fitted
        if fitted is not None:
            is_exchange = phase in (Phase.PROLOGUE, Phase.EPILOGUE)
            share = 0.5 * _share(fitted, pass_) if is_exchange else 0.0
            return share * fitted.exchange_bytes_per_token / degree
        sent_bytes = SENT_BYTES[self.backend]
        layer_bytes = sent_bytes(pass_, phase, 1.0 / degree, 1.0, degree, self.shape)
        return self.shape.num_layers * layer_bytes

    def _rate(self, degree: int) -> ExchangeRate:
        return self.profile.exchange_rate(self.backend, degree, self.shape.stride)

    def sample_us(self, lengths: IntArray, pass_: Pass) -> FloatArray:
        """`[n, K+1]` what each sample adds to every rank of its node: all phases and dense work."""
        tokens = np.asarray(lengths, dtype=np.float64)[:, None]
        dense_us_per_token = self.dense_us_per_token(pass_)
        sample_us = self._attention_us(lengths, pass_)
        if pass_ is self.recompute_pass and self.recompute != "none":
            again_us = self._attention_us(lengths, Pass.FWD)
            sample_us = sample_us + np.where(self._is_saved(lengths), 0.0, again_us)
            if self.recompute == "full":
                dense_us_per_token += self.dense_us_per_token(Pass.FWD)
        return sample_us + tokens * (dense_us_per_token / np.array(self.tree.degrees))

    def _is_saved(self, lengths: IntArray) -> npt.NDArray[np.bool_]:
        """`[n, K+1]` whether a sample's attention output is expected to be kept at a degree.

        The longest samples of the batch that all ranks together have room for, at degrees at which
        one rank has room for its part.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        order = np.argsort(-tokens, kind="stable")
        is_long = np.zeros(len(tokens), dtype=bool)
        is_long[order] = np.cumsum(tokens[order]) <= self.save_tokens * self.tree.num_ranks
        fits = tokens[:, None] <= self.save_tokens * np.array(self.tree.degrees)
        saved: npt.NDArray[np.bool_] = is_long[:, None] & fits
        return saved

    @property
    def recompute_pass(self) -> Pass:
        """The pass that recomputation is counted with.

        It runs in backward. Ranks that share experts wait for one another in it, as in forward and
        before the rest of backward, so its slowest rank is that of forward.
        """
        return Pass.FWD if self.shape.expert_degree > 1 else Pass.BWD

    def _attention_us(self, lengths: IntArray, pass_: Pass) -> FloatArray:
        """`[n, K+1]` the three phases of attention."""
        us_per_token = self.exchange_us_per_token(pass_, Phase.PROLOGUE)
        us_per_token = us_per_token + self.exchange_us_per_token(pass_, Phase.EPILOGUE)
        tokens = np.asarray(lengths, dtype=np.float64)[:, None]
        return self.compute_us(lengths, pass_) + tokens * us_per_token

    def sample_times(self, lengths: IntArray) -> SampleTimes:
        """Both passes of every sample of a batch, with the node latencies."""
        return SampleTimes(
            tree=self.tree,
            lengths=lengths,
            fwd_us=self.sample_us(lengths, Pass.FWD),
            bwd_us=self.sample_us(lengths, Pass.BWD),
            latency_us=self.node_latency_us,
            bias_us=self.profile.bias_us,
            expert_us=self._expert_us(lengths),
            expert_degree=self.shape.expert_degree,
        )

    def _expert_us(self, lengths: IntArray) -> FloatArray | None:
        """`[n, 2]` work of the samples' experts in both passes, where groups share it."""
        if self.shape.expert_degree == 1 or self.profile.fitted is not None:
            return None
        each_us = np.array([self.expert_us_per_token(pass_) for pass_ in Pass])
        if self.recompute == "full":
            each_us[0] *= 2.0  # see recompute_pass
        expert_us: FloatArray = np.asarray(lengths, dtype=np.float64)[:, None] * each_us
        return expert_us

    def score(self, plan: Plan) -> PlanScore:
        """The times of a plan."""
        assert plan.tree == self.tree, f"{plan.tree=} {self.tree=}"
        return self.sample_times(plan.lengths).score(
            self.tree.num_depths - 1 - plan.depth,
            plan.index,
            plan.micro_batch,
            plan.num_micro_batches,
        )
