"""An estimate of a rank's memory, and the token budget that follows from it.

    token budget = (memory - reserve - states) / bytes of activations for one token

States are weights, gradients and optimizer state. Activations follow Korthikanti et al. (2022),
without dropout and with a flash kernel: what each layer's backward reads, by recompute policy.
Sharding, offload and recompute policy are stated; nothing here looks at a machine.
"""

from dataclasses import dataclass

from megatron_nsp.config import RECOMPUTE
from megatron_nsp.cost.models import Model, check_parallel

WEIGHT_BYTES, GRAD_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Of one parameter: bf16 weight, fp32 gradient; fp32 master weight and two Adam moments."""

_LOGIT_BYTES = 2 + 4 + 4
"""Of one logit while the loss is worked out: bf16 output, fp32 copy, gradient."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a job spreads and holds its memory.

    Attributes:
        num_ranks: ranks of the data-parallel domain.
        tensor_parallel: tensor-parallel size.
        pipeline_parallel: pipeline-parallel size.
        expert_parallel: expert-parallel size.
        virtual_stages: chunks of the model on each pipeline rank.
        shards_weights: whether weights and gradients are sharded over the domain (FSDP).
        shards_optimizer: whether optimizer state is (FSDP or the distributed optimizer).
        offloads_optimizer: whether optimizer state is held by the host.
        recompute: one of `config.RECOMPUTE`.
        reserve_bytes: for the allocator, communicators and kernels' workspace.
    """

    num_ranks: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    virtual_stages: int = 1
    shards_weights: bool = True
    shards_optimizer: bool = True
    offloads_optimizer: bool = False
    recompute: str = "full"
    reserve_bytes: float = 6e9

    def __post_init__(self) -> None:
        """Refuses policies that do not exist.

        Raises:
            ValueError: names the policies.
        """
        if self.recompute not in RECOMPUTE:
            raise ValueError(
                f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute}"
            )


def state_bytes(model: Model, plan: MemoryPlan) -> float:
    """Bytes of weights, gradients and optimizer state on one rank."""
    check_parallel(model, plan.tensor_parallel, plan.pipeline_parallel, plan.expert_parallel)
    split = plan.tensor_parallel * plan.pipeline_parallel
    shared = model.shared_parameters / split
    experts = model.expert_parameters / (split * plan.expert_parallel)
    # Experts are sharded over the ranks that hold the same ones.
    expert_ranks = max(plan.num_ranks // plan.expert_parallel, 1)

    def held(is_sharded: bool) -> float:
        if not is_sharded:
            return shared + experts
        return shared / plan.num_ranks + experts / expert_ranks

    total = (WEIGHT_BYTES + GRAD_BYTES) * held(plan.shards_weights)
    if plan.shards_weights:  # one layer is gathered while it runs, the next one beside it
        layer = shared / model.num_layers + experts / model.num_layers
        total += 2 * (WEIGHT_BYTES + WEIGHT_BYTES) * layer
    if not plan.offloads_optimizer:
        total += OPTIMIZER_BYTES * held(plan.shards_optimizer)
    return total


def layer_activation_bytes(model: Model, tensor_parallel: int, holds_attention: bool) -> float:
    """Bytes that a layer holds for one token without recomputation, in bf16; the mean of layers."""
    output = model.num_heads * model.value_width
    keys_and_values = model.num_kv_heads * (model.head_dim + model.value_width)
    norms = 2 * 2 * model.hidden  # inputs of both norms
    projections = 2 * 2 * model.hidden  # what q, k, v and the MLP read
    attention = 2 * (model.num_heads * model.head_dim + keys_and_values + output)
    attention += 4 * model.num_heads  # LSE
    if not holds_attention:
        attention = 2 * output  # what the output projection reads
    # Outputs of the first matrices, and what the last one reads.
    mlp = 2.0 * model.active_width * model.num_matrices
    copies = 2 * 2 * model.top_k * model.hidden  # of a token, sent to experts and received
    mlp += copies * model.expert_layers / model.num_layers
    return norms + projections + (attention + mlp) / tensor_parallel


def activation_bytes(model: Model, plan: MemoryPlan) -> float:
    """Bytes of activations on one rank for each token it holds in a micro-batch.

    `none` holds every layer whole; `selective` recomputes core attention; `full` holds each layer's
    input, and one layer whole while it is recomputed. Logits are there at the end,
    once for each pass through the output layer.
    """
    tp = plan.tensor_parallel
    layers = model.num_layers // plan.pipeline_parallel
    whole = layer_activation_bytes(model, tp, holds_attention=True)
    held = {
        "none": layers * whole,
        "selective": layers * layer_activation_bytes(model, tp, holds_attention=False) + whole,
        "full": layers * 2.0 * model.hidden + whole,
    }[plan.recompute]
    logits = _LOGIT_BYTES * model.num_outputs * model.vocab_size / tp
    return held * micro_batches_in_flight(plan.pipeline_parallel, plan.virtual_stages) + logits


def micro_batches_in_flight(
    pipeline_parallel: int, virtual_stages: int = 1, group: int | None = None
) -> float:
    """Micro-batches that a first pipeline rank holds at once, where a step has enough of them.

    One for each rank of the pipeline. With virtual stages, Megatron's first rank has run all chunks
    but the last for a group of micro-batches, and twice as many passes more as there are ranks
    after it, when it begins to alternate with backward. Each of these holds one chunk's layers:

        p = 2 ranks, v = 2 chunks, groups of g = 2        2 (p - 1) + (v - 1) g + 1 = 5 passes
        forward  1.0 2.0 1.1 2.1 3.0     backward 1.1     over 2 chunks: 2.5 micro-batches

    Args:
        pipeline_parallel: ranks of the pipeline (p).
        virtual_stages: chunks of the model on each of them, of equally many layers (v).
        group: micro-batches that run through a chunk before the next one's turn (g); as many as
            ranks if not given.
    """
    if virtual_stages == 1:
        return pipeline_parallel
    group = pipeline_parallel if group is None else group
    return (2 * (pipeline_parallel - 1) + (virtual_stages - 1) * group + 1) / virtual_stages


def token_budget(model: Model, plan: MemoryPlan, memory_bytes: float) -> int:
    """The most tokens a rank can hold in a micro-batch.

    Raises:
        ValueError: the states alone do not fit; one line with both numbers.
    """
    states = state_bytes(model, plan) + plan.reserve_bytes
    free = memory_bytes - states
    tokens = int(free / activation_bytes(model, plan))
    if tokens < 1:
        raise ValueError(
            f"{model.name} does not fit: weights, gradients, optimizer and reserve take "
            f"{states / 1e9:.1f} GB of the {memory_bytes / 1e9:.1f} GB of a rank"
        )
    return tokens
