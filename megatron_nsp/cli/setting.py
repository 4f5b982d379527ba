"""The flags that `plan` and `simulate` share: ranks, degrees, model, profile, memory."""

import argparse

from megatron_nsp.config import RECOMPUTE, NSPConfig, Range, build_tree
from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.memory import MemoryPlan, token_budget
from megatron_nsp.cost.models import MODELS, Model, known_model
from megatron_nsp.cost.profile import Profile, built_in_profiles, load_profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.backends import backend_choices
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.steps.lengths import table_names

_SIZES = {"heads": 32, "kv_heads": 4, "head_dim": 128, "hidden": 2048, "layers": 48}
"""Sizes of the model without --model."""


_PARALLEL = ("tp", "pp", "vpp", "ep")
_TOKENS = ("batch_tokens", "max_len", "token_budget")

RANGES: dict[str, Range] = {
    **dict.fromkeys(("ranks", "max_degree"), (1, 2**16)),
    **dict.fromkeys((*_SIZES, *_PARALLEL), (1, 2**24)),
    **dict.fromkeys(_TOKENS, (1, 2**40)),
    "seed": (0, None),
}
"""What the flags may be by themselves."""


def tokens(text: str) -> int:
    """A number of tokens: `196608` or `192K`, or `2M` (1024 and 1024^2)."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    try:
        return int(text if factor == 1 else text[:-1]) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"takes tokens such as 4096, 192K or 2M, got {text}"
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "--lengths",
        required=True,
        metavar="FILE|NAME|a,b,c",
        help="sample lengths in tokens: a .txt, .npy, .npz or .idx file, a list, or one of "
        f"{', '.join(table_names())}",
    )
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the domain")
    parser.add_argument("--max-degree", type=int, help="largest degree of the chain 1, 2, 4, ...")
    parser.add_argument("--degrees", metavar="1,3,6", help="the whole chain of degrees instead")
    parser.add_argument(
        "--backend",
        default="auto",
        choices=backend_choices(),
        help="how ranks of a node divide attention; auto: the fastest way (%(default)s)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=tokens,
        help="draw whole samples until this many tokens; without it the whole list is one batch",
    )
    parser.add_argument("--max-len", type=tokens, help="leave out samples of more tokens, counted")
    parser.add_argument(
        "--token-budget",
        type=tokens,
        help="most tokens a rank may hold in a micro-batch; as many micro-batches as that needs",
    )
    parser.add_argument(
        "--token-balance",
        type=float,
        help="a budget of this many times a rank's mean tokens, if that is less",
    )
    parser.add_argument(
        "--profile",
        default="h100-ib",
        metavar="NAME|FILE",
        help=f"cost profile: {', '.join(built_in_profiles())} or a JSON file (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help=f"a known model: {', '.join(MODELS)}")
    model.add_argument("--tp", type=int, default=1, help="tensor-parallel size (%(default)s)")
    model.add_argument("--pp", type=int, default=1, help="pipeline-parallel size (%(default)s)")
    model.add_argument(
        "--vpp", type=int, default=1, help="chunks of the model on a pipeline rank (%(default)s)"
    )
    model.add_argument("--ep", type=int, default=1, help="expert-parallel size (%(default)s)")
    for name, default in _SIZES.items():
        flag = "--" + name.replace("_", "-")
        model.add_argument(flag, type=int, help=f"of another model, on one rank ({default})")
    memory = parser.add_argument_group("memory of a --model, instead of --token-budget")
    memory.add_argument("--memory-gb", type=float, help="of one rank, 10^9 bytes")
    parser.add_argument(
        "--recompute",
        default="none",
        choices=RECOMPUTE,
        help="what backward runs again: nothing, core attention, or whole layers (%(default)s)",
    )
    memory.add_argument(
        "--offload-optimizer", action="store_true", help="optimizer state is held by the host"
    )


def cost_model(args: argparse.Namespace) -> CostModel:
    """The cost model that the flags describe.

    Raises:
        ValueError: one line naming the flag and both numbers.
    """
    profile = load_profile(args.profile)
    shape = _shape(args)
    tree = _tree(args, shape, profile)
    if profile.fitted is not None and args.backend not in ("auto", "ulysses"):
        raise ValueError(
            f"--backend must be auto or ulysses with --profile {profile.name}, which holds the "
            f"times of one model with Ulysses, got {args.backend}"
        )
    return CostModel(profile, shape, tree, args.backend, args.recompute)


def budget(args: argparse.Namespace, profile: Profile) -> int | None:
    """The token budget that the flags ask for.

    Raises:
        ValueError: the flags do not fit together, or the model does not fit the memory.
    """
    if args.memory_gb is None:
        return args.token_budget
    if args.token_budget is not None:
        raise ValueError(
            f"--memory-gb {args.memory_gb} gives a token budget, --token-budget "
            f"{args.token_budget} must not be given too"
        )
    if not 0 < args.memory_gb < 1e9:
        raise ValueError(f"--memory-gb must be positive and finite, got {args.memory_gb}")
    if args.model is None:
        raise ValueError(f"--memory-gb {args.memory_gb} needs --model")
    return token_budget(known_model(args.model), memory_plan(args), args.memory_gb * 1e9)


def memory_plan(args: argparse.Namespace) -> MemoryPlan:
    """How the flags spread the memory: weights and optimizer sharded over the domain."""
    return MemoryPlan(
        num_ranks=args.ranks,
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        virtual_stages=args.vpp,
        expert_parallel=args.ep,
        offloads_optimizer=args.offload_optimizer,
        recompute=args.recompute,
    )


def _shape(args: argparse.Namespace) -> ModelShape:
    given = [name for name in _SIZES if getattr(args, name) is not None]
    if args.model is not None:
        if given:
            raise ValueError(f"--model {args.model} has sizes, --{given[0]} must not be given too")
        model: Model = known_model(args.model)
        if args.vpp > 1 and args.pp == 1:
            raise ValueError(f"--vpp {args.vpp} needs --pp of at least 2, got {args.pp}")
        if args.ep > 1 and args.ranks % args.ep:
            raise ValueError(f"--ep {args.ep} does not divide --ranks {args.ranks}")
        return model.shape(args.tp, args.pp, args.ep)
    for name in _PARALLEL:
        if getattr(args, name) != 1:
            raise ValueError(f"--{name} {getattr(args, name)} needs --model")
    heads, kv_heads, head_dim, hidden, layers = (
        default if getattr(args, name) is None else getattr(args, name)
        for name, default in _SIZES.items()
    )
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    return ModelShape.from_hidden(layers, hidden, heads, kv_heads, head_dim)


def _tree(args: argparse.Namespace, shape: ModelShape, profile: Profile) -> SPTree:
    degrees = None
    if args.degrees is not None:
        try:
            degrees = tuple(int(word) for word in args.degrees.split(","))
        except ValueError as error:
            raise ValueError(f"--degrees takes whole numbers, got {args.degrees}") from error
    config = NSPConfig(max_degree=args.max_degree, degrees=degrees, backend=args.backend)
    heads = (shape.num_heads, shape.num_kv_heads) if profile.fitted is None else (None, None)
    try:
        config.validate()
        return build_tree(config, args.ranks, *heads)
    except ValueError as error:
        # The training flags are called --nsp-max-degree, ours --max-degree.
        raise ValueError(str(error).replace("--nsp-", "--")) from error
