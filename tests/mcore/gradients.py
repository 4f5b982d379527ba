"""The gradients a rank holds, in the shape and under the name they have in a model of one rank.

Import it after CPU mode is on.
"""

import math
import re

import torch
from megatron.core import parallel_state as mpu
from megatron.training import training
from torch import Tensor
from torch.distributed.tensor import DTensor

OUTPUT, TIED_TO = "output_layer.weight", "embedding.word_embeddings.weight"


def held_gradients(models: list[torch.nn.Module]) -> dict[str, Tensor]:
    """The gradient of every whole parameter, NaN where this rank holds no part of it."""
    gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                held = _over_tensor_parallel(parameter, _over_data_parallel(model, parameter))
                gradients[global_name(name, first_layer(model))] = held
    return gradients


def first_layer(model: torch.nn.Module) -> int:
    """Layers of the whole model before the first of this chunk of it."""
    layers = (module for name, module in model.named_modules() if "decoder.layers." in name)
    return (
        min((each.layer_number for each in layers if hasattr(each, "layer_number")), default=1) - 1
    )


def global_name(name: str, first_layer: int) -> str:
    """The parameter's name in a model of one rank: its layer, its expert, its tied weight."""
    args = training.get_args()
    if "mtp.layers." not in name:  # those are counted apart, and all on the last stage
        name = _shifted(name, "layers", first_layer)
    if args.num_experts:
        experts = args.num_experts // mpu.get_expert_model_parallel_world_size()
        first = experts * mpu.get_expert_model_parallel_rank()
        name = _shifted(name, "local_experts", first)
    name = re.sub(r"^(module\.)+", "", name)
    is_tied = name == OUTPUT and not args.untie_embeddings_and_output_weights
    return TIED_TO if is_tied else name


def _shifted(name: str, of: str, by: int) -> str:
    return re.sub(rf"\b{of}\.(\d+)\.", lambda found: f"{of}.{int(found[1]) + by}.", name)


def _over_data_parallel(model: torch.nn.Module, parameter: torch.nn.Parameter) -> Tensor:
    """The gradient without what a sharded optimizer has on other ranks."""
    if isinstance(parameter, DTensor):  # Megatron-FSDP
        gradient = torch.full(parameter.shape, math.nan, dtype=parameter.dtype)
        if parameter.grad is not None:
            part = parameter.megatron_fsdp_slice
            gradient.view(-1)[part] = parameter.grad.to_local().flatten()
        return gradient
    gradient = parameter.main_grad.detach().clone()
    if training.get_args().use_distributed_optimizer:
        (buffer,) = (
            buffer
            for buffer in [*model.buffers, *model.expert_parallel_buffers]
            if parameter in buffer.param_index_map
        )
        start, stop, bucket = buffer.param_index_map[parameter]
        shard = buffer.buckets[bucket].grad_data.numel() // buffer.data_parallel_group.size()
        first = buffer.buckets[bucket].offset + shard * buffer.data_parallel_group.rank()
        place = torch.arange(start, stop)
        is_held = (place >= first) & (place < first + shard)
        gradient[~is_held.view(gradient.shape)] = math.nan
    return gradient


def _over_tensor_parallel(parameter: torch.nn.Parameter, part: Tensor) -> Tensor:
    """The part in its place; a gated MLP has a part of both its halves on each rank (stride 2)."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return part
    ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if not getattr(parameter, "allreduce", True):  # experts may be split otherwise
        ranks = mpu.get_expert_tensor_parallel_world_size()
        rank = mpu.get_expert_tensor_parallel_rank()
    blocks = []
    for own in part.chunk(parameter.partition_stride, parameter.partition_dim):
        others = torch.full_like(own, math.nan)
        blocks += [own if place == rank else others for place in range(ranks)]
    return torch.cat(blocks, parameter.partition_dim)
