"""Sizes of a job that several of Megatron's arguments make up together."""

import argparse
import re


def domain_size(args: argparse.Namespace) -> int:
    """Ranks of the data-parallel domain."""
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return int(args.world_size // model_parallel)


def counted_ranks(args: argparse.Namespace) -> int:
    """Data-parallel ranks as Megatron counts batches: those of a context-parallel group are one."""
    return domain_size(args) // int(args.context_parallel_size)


def num_micro_batches(args: argparse.Namespace) -> int:
    """Micro-batches of a step; of the smallest one where a schedule changes its size."""
    whole = counted_ranks(args) * (args.micro_batch_size or 1)
    scheduled = re.findall(r":(\d+)", args.step_batch_size_schedule or "")
    if scheduled:
        return min(int(samples) for samples in scheduled) // whole
    return 1 if args.global_batch_size is None else int(args.global_batch_size // whole)


def micro_batch_group(args: argparse.Namespace) -> int:
    """How many micro-batches a pipeline rank runs through one chunk before it takes the next."""
    group: int | None = args.microbatch_group_size_per_vp_stage
    return args.pipeline_model_parallel_size if group is None else group


def kv_heads(args: argparse.Namespace) -> int:
    """Key/value heads of the model."""
    return int(args.num_query_groups if args.group_query_attention else args.num_attention_heads)


def heads_per_rank(args: argparse.Namespace) -> tuple[int, int]:
    """Query and key/value heads on a tensor-parallel rank."""
    tensor_parallel = args.tensor_model_parallel_size
    heads = args.num_attention_heads // tensor_parallel
    return heads, max(1, kv_heads(args) // tensor_parallel)


def sequence_tokens(args: argparse.Namespace) -> int:
    """Tokens of one of the sequences in which Megatron counts batches."""
    return int(args.seq_length or args.nsp_max_length)


def longest_sample(args: argparse.Namespace) -> int | None:
    """Longest sample to train on, in tokens; None where no flag says it."""
    longest: int | None = args.nsp_max_length or args.seq_length
    return longest
