"""How long all ranks take to gather a layer's sharded parameters, and to scatter its gradients.

Of d ranks, h beside one another on a host, every host needs the (d - h) / d of the bytes that it
does not hold, through the network ports of its h ranks, and every rank the (d - 1) / d that it
does not hold, inside the host:

    time = max((d - h) / d bytes / (h inter), (d - 1) / d bytes / intra)

Experts are sharded over the ranks that hold the same ones, which are an expert-parallel group
apart.
"""

from megatron_nsp.cost.memory import GRAD_BYTES, WEIGHT_BYTES
from megatron_nsp.cost.models import Model
from megatron_nsp.cost.profile import Profile


def sharding_us(
    model: Model,
    profile: Profile,
    num_ranks: int,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
) -> tuple[float, float]:
    """Microseconds to gather one layer's weights, and to scatter its gradients.

    Raises:
        ValueError: the profile has no rate for it.
    """
    shared = (model.shared_parameters / model.num_layers) / tensor_parallel
    experts = model.expert_parameters / model.num_layers / (tensor_parallel * expert_parallel)
    peers = max(num_ranks // expert_parallel, 1)
    each = _us_per_byte(profile, num_ranks, tensor_parallel) * shared
    each += _us_per_byte(profile, peers, tensor_parallel * expert_parallel) * experts
    return each * WEIGHT_BYTES, each * GRAD_BYTES


def _us_per_byte(profile: Profile, num_ranks: int, stride: int) -> float:
    """For each byte of the whole, among ranks that are `stride` GPUs apart."""
    beside = min(profile.ranks_together(stride), num_ranks)
    outside = inside = 0.0
    if beside < num_ranks:
        outside = (num_ranks - beside) / num_ranks / (beside * profile.rate_between())
    if beside > 1:
        inside = (num_ranks - 1) / num_ranks / profile.rate_inside()
    return max(outside, inside) * 1e6
