"""Sizes of known models, from their published configurations, and what follows from sizes.

A `Model` is a whole model; `shape` says what one rank of it costs the planner under tensor,
pipeline and expert parallelism.
"""

from dataclasses import dataclass

from megatron_nsp.cost.shape import ModelShape


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    Attributes:
        name: how `--model` calls it.
        source: where the sizes were published.
        num_layers: transformer layers.
        hidden: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: elements of a head.
        ffn_hidden: width of an MLP that is no expert.
        vocab_size: rows of the embedding.
        num_mlps: such MLPs in the model; None = one in each layer without experts.
        num_experts: experts of a layer that has any; 0 = a dense model.
        num_expert_layers: layers that have experts; None = all of them, in a model with experts.
        expert_hidden: width of one expert.
        top_k: experts a token passes through.
        shared_width: width of the MLP that all tokens pass through beside their experts.
        is_gated: whether MLPs have three matrices instead of two.
        is_tied: whether the output layer shares the embedding's weights.
        value_dim: elements of a head of values; None = `head_dim`.
        projections: parameters of one layer's projections q, k, v and out where they are not four
            plain matrices, as in latent attention.
        num_outputs: how often a token passes the output layer: once, and once for each depth of
            multi-token prediction.
        num_windowed_layers: layers with a sliding window.
        window_left: most tokens before itself that a token sees in such a layer.
    """

    name: str
    source: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab_size: int
    num_mlps: int | None = None
    num_experts: int = 0
    num_expert_layers: int | None = None
    expert_hidden: int = 0
    top_k: int = 1
    shared_width: int = 0
    is_gated: bool = True
    is_tied: bool = False
    value_dim: int | None = None
    projections: int | None = None
    num_outputs: int = 1
    num_windowed_layers: int = 0
    window_left: int = 0

    @property
    def value_width(self) -> int:
        """Elements of a head of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def num_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.is_gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's projections q, k, v and out."""
        if self.projections is not None:
            return self.projections
        width = self.head_dim + self.value_width
        return self.hidden * (self.num_heads + self.num_kv_heads) * width

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        if self.num_expert_layers is None:
            return self.num_layers if self.num_experts else 0
        return self.num_expert_layers

    @property
    def mlps(self) -> int:
        """MLPs that are no experts, in the whole model."""
        return self.num_layers - self.expert_layers if self.num_mlps is None else self.num_mlps

    @property
    def routed_parameters(self) -> int:
        """Parameters of the experts that one token passes through, in the whole model."""
        matrix = self.hidden * self.expert_hidden
        return self.expert_layers * self.top_k * self.num_matrices * matrix

    @property
    def unrouted_parameters(self) -> int:
        """Parameters of MLPs and routers, which every token passes through, in the whole model."""
        mlps = self.num_matrices * self.hidden * self.ffn_hidden * self.mlps
        beside = self.num_matrices * self.hidden * self.shared_width
        return mlps + self.expert_layers * (beside + self.num_experts * self.hidden)

    @property
    def active_width(self) -> int:
        """Width of MLP that one token passes through in a layer, the rounded mean of all layers."""
        per_expert_layer = self.expert_hidden * self.top_k + self.shared_width
        width = self.mlps * self.ffn_hidden + self.expert_layers * per_expert_layer
        return round(width / self.num_layers)

    @property
    def shared_parameters(self) -> int:
        """Parameters that every expert-parallel rank holds: all but the experts."""
        embeddings = self.vocab_size * self.hidden * (1 if self.is_tied else 2)
        layer = self.attention_parameters + 2 * self.hidden
        return embeddings + self.num_layers * layer + self.unrouted_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        each = self.num_matrices * self.hidden * self.expert_hidden
        return self.expert_layers * self.num_experts * each

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; biases and small per-head norms are left out."""
        return self.shared_parameters + self.expert_parameters

    def shape(
        self,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        expert_parallel: int = 1,
        bytes_per_element: int = 2,
    ) -> ModelShape:
        """What one rank costs.

        Raises:
            ValueError: the sizes do not divide; one line naming both numbers.
        """
        check_parallel(self, tensor_parallel, pipeline_parallel, expert_parallel)
        parameters = self.num_layers * self.attention_parameters
        parameters += self.unrouted_parameters + self.routed_parameters
        # There and back, once for each expert of the token, in the layers that have experts.
        expert_bytes = 2.0 * self.top_k * self.hidden * bytes_per_element
        expert_bytes *= self.expert_layers / self.num_layers
        return ModelShape(
            num_layers=self.num_layers // pipeline_parallel,
            hidden=self.hidden,
            num_heads=self.num_heads // tensor_parallel,
            num_kv_heads=max(self.num_kv_heads // tensor_parallel, 1),
            head_dim=self.head_dim,
            dense_flops_per_token=2.0 * parameters / self.num_layers / tensor_parallel,
            bytes_per_element=bytes_per_element,
            output_flops_per_token=(
                2.0 * self.num_outputs * self.vocab_size * self.hidden / tensor_parallel
            ),
            expert_flops_per_token=2.0 * self.routed_parameters / self.num_layers / tensor_parallel,
            expert_bytes_per_token=expert_bytes * (1 - 1 / expert_parallel) / tensor_parallel,
            expert_degree=expert_parallel,
            stride=tensor_parallel,
            value_dim=self.value_width,
            num_windowed_layers=-(-self.num_windowed_layers // pipeline_parallel),
            window_left=self.window_left,
        )


def check_parallel(
    model: Model, tensor_parallel: int, pipeline_parallel: int, expert_parallel: int
) -> None:
    """Checks that a model divides over the parallel sizes.

    Raises:
        ValueError: it does not; one line naming both numbers.
    """
    heads, kv_heads = model.num_heads, model.num_kv_heads
    splits_kv = kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0
    if heads % tensor_parallel or not splits_kv:
        raise ValueError(
            f"tensor parallelism {tensor_parallel} cannot split the {heads} query and {kv_heads} "
            f"key/value heads of {model.name} evenly"
        )
    if model.num_layers % pipeline_parallel:
        raise ValueError(
            f"pipeline parallelism {pipeline_parallel} does not divide the {model.num_layers} "
            f"layers of {model.name}"
        )
    if expert_parallel > 1 and (not model.num_experts or model.num_experts % expert_parallel):
        raise ValueError(
            f"expert parallelism {expert_parallel} does not divide the {model.num_experts} experts "
            f"of {model.name}"
        )


def _config(name: str) -> str:
    return f"config.json of {name} on the Hugging Face hub"


MODELS = {
    model.name: model
    for model in (
        Model(
            name="qwen3-30b-a3b",
            source=_config("Qwen/Qwen3-30B-A3B"),
            num_layers=48,
            hidden=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            ffn_hidden=6144,
            vocab_size=151936,
            num_experts=128,
            expert_hidden=768,
            top_k=8,
        ),
        Model(
            name="qwen3-235b-a22b",
            source=_config("Qwen/Qwen3-235B-A22B"),
            num_layers=94,
            hidden=4096,
            num_heads=64,
            num_kv_heads=4,
            head_dim=128,
            ffn_hidden=12288,
            vocab_size=151936,
            num_experts=128,
            expert_hidden=1536,
            top_k=8,
        ),
        Model(
            name="qwen3-8b",
            source=_config("Qwen/Qwen3-8B"),
            num_layers=36,
            hidden=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden=12288,
            vocab_size=151936,
        ),
        Model(
            name="llama-3.1-8b",
            source=_config("meta-llama/Llama-3.1-8B"),
            num_layers=32,
            hidden=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden=14336,
            vocab_size=128256,
        ),
        Model(
            name="llama-3.2-1b",
            source=_config("meta-llama/Llama-3.2-1B"),
            num_layers=16,
            hidden=2048,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            ffn_hidden=8192,
            vocab_size=128256,
            is_tied=True,
        ),
        Model(
            name="llama-3.2-3b",
            source=_config("meta-llama/Llama-3.2-3B"),
            num_layers=28,
            hidden=3072,
            num_heads=24,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden=8192,
            vocab_size=128256,
            is_tied=True,
        ),
        Model(
            name="qwen1.5-1.8b",
            source=_config("Qwen/Qwen1.5-1.8B"),
            num_layers=24,
            hidden=2048,
            num_heads=16,
            num_kv_heads=16,
            head_dim=128,
            ffn_hidden=5504,
            vocab_size=151936,
        ),
        Model(
            name="qwen2.5-3b",
            source=_config("Qwen/Qwen2.5-3B"),
            num_layers=36,
            hidden=2048,
            num_heads=16,
            num_kv_heads=2,
            head_dim=128,
            ffn_hidden=11008,
            vocab_size=151936,
            is_tied=True,
        ),
        Model(
            name="gpt-7b",
            source="Brown et al. 2020, table 2.1 (6.7B), as FlexSP sets it up: 32 layers of 4096",
            num_layers=32,
            hidden=4096,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            ffn_hidden=16384,
            vocab_size=50257,
            is_gated=False,
            is_tied=True,
        ),
    )
}
"""Known models by name."""


def known_model(name: str) -> Model:
    """A model by name.

    Raises:
        ValueError: it is unknown; names the known ones.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name}, only {', '.join(MODELS)}")
    return MODELS[name]
