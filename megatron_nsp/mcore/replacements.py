"""Flags that are taken as a wish: what is set in their place, and the line that says so.

They come from jobs that run without nested sequence parallelism, or that reached for long samples
by other means. Set before Megatron validates its arguments, on all ranks alike.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Replacement:
    """One thing that flags ask for and get otherwise.

    Attributes:
        flag: the flag that asks for it.
        applies: whether the arguments ask for it.
        values: what is set in its place, by argument; those of callables are made from arguments.
        line: what the user reads after the flag, with arguments in braces.
    """

    flag: str
    applies: Callable[[argparse.Namespace], Any]
    values: Mapping[str, Any]
    line: str

    def apply(self, args: argparse.Namespace) -> str | None:
        """Sets what stands in its place, and says so; None where nothing asks for it."""
        if not self.applies(args):
            return None
        line = f"{self.flag} {self.line.format(**vars(args))}"
        for name, value in self.values.items():
            assert hasattr(args, name), f"this Megatron has no argument {name}"
            setattr(args, name, value(args) if callable(value) else value)
        return line


def _off(flag: str, why: str) -> Replacement:
    """Switches a flag off that makes a run faster and changes no result."""
    name = flag[2:].replace("-", "_")
    return Replacement(
        flag, lambda args: getattr(args, name), {name: False}, f"is switched off: {why}"
    )


_BUFFERS = "its buffers have one number of rows, and micro-batches have theirs"
_APART = "it takes the layers of two micro-batches apart, and each has its own exchanges"


def _budget(args: argparse.Namespace) -> int:
    return int(args.nsp_token_budget or args.max_seqlen_per_dp_cp_rank)


def _sends_uneven_rows(args: argparse.Namespace) -> bool:
    """Whether experts are reached by HybridEP, which takes all ranks to hold as many rows."""
    is_flex = args.num_experts and args.moe_token_dispatcher_type == "flex"
    is_hybrid = is_flex and args.moe_flex_dispatcher_backend == "hybridep"
    return bool(is_hybrid and not args.moe_hybridep_pad_uneven_dispatch_inputs)


REPLACEMENTS: Sequence[Replacement] = (
    Replacement(
        "--calculate-per-token-loss",
        lambda args: not args.calculate_per_token_loss,
        {"calculate_per_token_loss": True},
        "is switched on: ranks hold different numbers of tokens, so losses are summed over tokens",
    ),
    Replacement(
        "--dataloader-type",
        lambda args: args.dataloader_type not in (None, "external"),
        {},
        "{dataloader_type} is replaced: the plan says which rank reads what",
    ),
    Replacement(
        "--max-seqlen-per-dp-cp-rank",
        lambda args: args.max_seqlen_per_dp_cp_rank is not None,
        {"nsp_token_budget": _budget, "max_seqlen_per_dp_cp_rank": None},
        "{max_seqlen_per_dp_cp_rank} is replaced by --nsp-token-budget: the most tokens of a rank "
        "in one micro-batch",
    ),
    Replacement(
        "--context-parallel-size",
        lambda args: args.context_parallel_size > 1,
        {},  # once Megatron has counted batches by it: `replace_validated`
        "{context_parallel_size} is replaced: a long sample is shared by as many data-parallel "
        "ranks as it needs, a short one by none",
    ),
    Replacement(
        "--hybrid-context-parallel",
        lambda args: args.hybrid_context_parallel,
        {},  # once a step's tokens are known: `Job.from_args`
        "is replaced: the plan says how many ranks share a sample",
    ),
    Replacement(
        "--cp-comm-type",
        lambda args: args.cp_comm_type != ["p2p"],
        {"cp_comm_type": ["p2p"], "hierarchical_context_parallel_sizes": None},
        "is replaced by --nsp-backend {nsp_backend}: how ranks exchange is chosen for each node",
    ),
    Replacement(
        "--multi-latent-attention",
        lambda args: args.multi_latent_attention and args.apply_rope_fusion,
        {"apply_rope_fusion": False},
        "runs with --no-rope-fusion: the fused kernel rotates by row and not by position",
    ),
    Replacement(
        "--hybrid-override-pattern",
        lambda args: args.hybrid_override_pattern is not None,
        {
            "hybrid_layer_pattern": lambda args: args.hybrid_override_pattern,
            "hybrid_override_pattern": None,
        },
        "is replaced by --hybrid-layer-pattern {hybrid_override_pattern}, its newer name",
    ),
    Replacement(
        "--moe-token-dispatcher-type",
        lambda args: args.num_experts and args.moe_token_dispatcher_type == "allgather",
        {"moe_token_dispatcher_type": "alltoall"},
        "allgather is replaced by alltoall: ranks hold different numbers of tokens",
    ),
    Replacement(
        "--moe-hybridep-pad-uneven-dispatch-inputs",
        _sends_uneven_rows,
        {"moe_hybridep_pad_uneven_dispatch_inputs": True},
        "is switched on: ranks hold different numbers of tokens",
    ),
    _off(
        "--ddp-average-in-collective",
        "gradients are summed over ranks and divided by tokens, not by ranks",
    ),
    _off("--tp-comm-overlap", _BUFFERS),
    _off("--defer-embedding-wgrad-compute", _BUFFERS),
    Replacement(
        "--overlap-moe-expert-parallel-comm",
        lambda args: args.overlap_moe_expert_parallel_comm,
        {},  # once Megatron has looked at the environment: `replace_validated`
        f"is switched off: {_APART}",
    ),
    _off("--delay-wgrad-compute", _APART),
    _off("--ep-overlap-early-attn-memory-release", _APART),
)


def apply_replacements(args: argparse.Namespace) -> list[str]:
    """Sets what stands in the place of flags that are taken as a wish.

    Args:
        args: Megatron's arguments with ours, before Megatron validates them.

    Returns:
        A line for each that was asked for.
    """
    lines = [replacement.apply(args) for replacement in REPLACEMENTS]
    args.dataloader_type = "external"
    return [line for line in lines if line is not None]


def replace_validated(args: argparse.Namespace) -> None:
    """Sets what Megatron was to see while it validated its arguments, and is not to see in the run.

    It counts batches by context-parallel groups, and goes on to: `data_parallel_size` stays as it
    is, while their ranks become ranks of the domain. Where communication of experts overlaps, it
    asks for other settings of the environment.
    """
    args.context_parallel_size = 1
    args.overlap_moe_expert_parallel_comm = False
