"""Which layers are on which pipeline stage, by Megatron's own rules for the model it builds.

A pipeline rank runs one chunk of the model, or several: virtual stages. Layers go to chunk after
chunk, and to rank after rank in each:

    4 layers on 2 ranks with 2 chunks each      rank 0    layers 1, 3
                                                rank 1    layers 2, 4

A hybrid model says with `|` where a chunk ends, `--pipeline-model-parallel-layout` spells out all
chunks of a GPT model, and otherwise Megatron shares the layers out.
"""

import argparse
import itertools

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build


def virtual_stages(args: argparse.Namespace) -> int:
    """Chunks of the model on every pipeline rank: what Megatron's validation makes of the flags.

    Args:
        args: Megatron's arguments, validated or not.
    """
    ranks = args.pipeline_model_parallel_size
    if args.hybrid_layer_pattern is not None:
        return max(len(args.hybrid_layer_pattern.split("|")) // ranks, 1)
    if args.pipeline_model_parallel_layout is not None:
        return int(_layout(args).virtual_pipeline_model_parallel_size)
    if args.num_layers_per_virtual_pipeline_stage is not None:
        return layers_of_a_rank(args) // args.num_layers_per_virtual_pipeline_stage
    return args.num_virtual_stages_per_pipeline_rank or 1


def layers_of_a_rank(args: argparse.Namespace) -> int:
    """Layers of each pipeline rank in equal shares, of which embedding and loss may count as one.

    Args:
        args: Megatron's arguments, validated or not.
    """
    layers = args.num_layers + args.account_for_embedding_in_pipeline_split
    return (layers + args.account_for_loss_in_pipeline_split) // args.pipeline_model_parallel_size


def chunk_sizes(args: argparse.Namespace) -> list[list[int]]:
    """Layers of each chunk, by pipeline rank.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        AssertionError: Megatron cannot share the layers out; its own text.
    """
    ranks, chunks = args.pipeline_model_parallel_size, virtual_stages(args)
    if "|" in (args.hybrid_layer_pattern or ""):
        sizes = [len(chunk) for chunk in args.hybrid_layer_pattern.split("|")]
        return [sizes[rank::ranks] for rank in range(ranks)]
    if args.pipeline_model_parallel_layout is not None:
        return [[chunk.count(LayerType.decoder) for chunk in rank] for rank in _layout(args).layout]
    config = argparse.Namespace(
        num_layers=args.num_layers,
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
    )
    return [
        [get_num_layers_to_build(config, chunk, rank) for chunk in range(chunks)]
        for rank in range(ranks)
    ]


def chunk_layers(args: argparse.Namespace) -> list[list[range]]:
    """The layers of each chunk, by pipeline rank, counted from 0 through the whole model.

    Args:
        args: Megatron's arguments, validated or not.

    Raises:
        AssertionError: as `chunk_sizes`.
    """
    sizes = chunk_sizes(args)
    in_order = [size for chunk in zip(*sizes, strict=True) for size in chunk]
    bounds = itertools.pairwise(itertools.accumulate(in_order, initial=0))
    layers = [range(start, stop) for start, stop in bounds]
    return [layers[rank :: len(sizes)] for rank in range(len(sizes))]


def _layout(args: argparse.Namespace) -> PipelineParallelLayerLayout:
    layout = PipelineParallelLayerLayout(
        args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    )
    layout.validate_layer_layout(args.num_layers, args.mtp_num_layers)
    return layout


def stage_error(args: argparse.Namespace) -> str | None:
    """Why the layers cannot be shared out as flags ask, if so; one line.

    Args:
        args: Megatron's arguments, validated or not.
    """
    try:
        ranks = chunk_sizes(args)
    except AssertionError as error:
        return " ".join(str(error).split())
    if len(ranks) == 1 and len(ranks[0]) > 1:
        return f"{len(ranks[0])} virtual stages take turns on at least 2 ranks"
    sizes = [size for rank in ranks for size in rank]
    if sum(sizes) == args.num_layers and min(sizes) >= 0:
        return None
    return f"the ranks would have {', '.join(str(sum(rank)) for rank in ranks)} layers"
