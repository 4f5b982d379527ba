"""Which of Megatron's token dispatchers carries tokens to their experts."""

import argparse


def replace_dispatcher(args: argparse.Namespace) -> list[str]:
    """Sets up a dispatcher for ranks that hold different numbers of tokens.

    All-to-all computes what all-gather does, which needs as many rows on every rank. HybridEP does
    so too, unless it is told that ranks differ.

    Args:
        args: Megatron's arguments, validated or not; changed in place.

    Returns:
        A line for the user for each thing that was replaced.
    """
    if not args.num_experts:
        return []
    if args.moe_token_dispatcher_type == "allgather":
        args.moe_token_dispatcher_type = "alltoall"
        return [
            "--moe-token-dispatcher-type allgather is replaced by alltoall: ranks hold different "
            "numbers of tokens"
        ]
    is_hybrid = args.moe_token_dispatcher_type == "flex" and (
        args.moe_flex_dispatcher_backend == "hybridep"
    )
    if is_hybrid and not args.moe_hybridep_pad_uneven_dispatch_inputs:
        args.moe_hybridep_pad_uneven_dispatch_inputs = True
        return [
            "--moe-hybridep-pad-uneven-dispatch-inputs is switched on: ranks hold different "
            "numbers of tokens"
        ]
    return []
