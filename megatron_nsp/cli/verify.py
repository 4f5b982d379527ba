"""`megatron-nsp verify`: nested attention on local gloo ranks against a one-process oracle."""

import argparse
import json
import sys
from dataclasses import replace

from megatron_nsp.config import check_ranges
from megatron_nsp.plan.backends import BACKENDS, OURS, backends_of
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.split import ULYSSES, Split
from megatron_nsp.plan.tree import SPTree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--ranks", type=int, required=True, help="local ranks to start")
    parser.add_argument(
        "--degrees", help="chain of degrees, for example 1,3,6; default: powers of two"
    )
    parser.add_argument(
        "--lengths", required=True, help="tokens of each sample, for example 100,7,1"
    )
    parser.add_argument(
        "--nodes", required=True, help="degree:index of each sample's node, for example 4:0,2:1,1:3"
    )
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key/value heads; default: as many")
    parser.add_argument("--head-dim", type=int, default=64, help="elements of a head")
    parser.add_argument("--value-dim", type=int, help="elements of a value; default: as of a head")
    parser.add_argument(
        "--backend",
        default="ulysses",
        choices=[choice for name in OURS for choice in BACKENDS[name].choices],
        help="how the ranks of every node above degree 1 divide attention (%(default)s)",
    )
    parser.add_argument(
        "--ring-degree",
        type=int,
        help="ring members of such a node, at most its degree, for usp and gather; default: as few "
        "as heads allow, but 2 at least",
    )
    parser.add_argument("--full-mask", action="store_true", help="no causal mask")
    parser.add_argument("--window", type=int, help="most tokens before itself that a token sees")
    parser.add_argument("--sinks", action="store_true", help="an attention sink in every head")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32", "bfloat16"))
    parser.add_argument("--no-overlap", action="store_true", help="finish a node before the next")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="limit of a collective, seconds"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


# Destination -> the least and the most that a run on this machine can mean.
_RANGES = {
    "ranks": (1, 64),
    "heads": (1, 4096),
    "kv_heads": (1, 4096),
    "head_dim": (1, 4096),
    "value_dim": (1, 4096),
    "ring_degree": (2, 64),
    "window": (0, 2**20),
    "seed": (0, 2**63 - 1),
    "timeout": (1, 86400),
}
_MOST_TOKENS = 2**20
"""The oracle computes every sample whole, in double precision."""

FAILED = 3
"""Exit status when a rank fails or does not answer, so that nothing was compared."""


def _integers(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} takes whole numbers divided by commas, got {text!r}") from None


def forced_plan(args: argparse.Namespace) -> Plan:
    """The plan the flags describe.

    Raises:
        ValueError: lengths and nodes do not fit together, or a node does not exist.
    """
    lengths = _integers(args.lengths, "--lengths")
    if args.degrees is None:
        tree = SPTree.powers_of_two(args.ranks)
    else:
        tree = SPTree(args.ranks, tuple(_integers(args.degrees, "--degrees")))
    nodes = []
    for text in args.nodes.split(","):
        degree, colon, index = text.partition(":")
        if not (colon and degree.isdigit() and index.isdigit()):
            raise ValueError(f"--nodes takes degree:index divided by commas, got {text!r}")
        nodes.append(tree.node(int(degree), int(index)))
    if len(nodes) != len(lengths):
        raise ValueError(f"--nodes names {len(nodes)} nodes for {len(lengths)} --lengths")
    if sum(lengths) > _MOST_TOKENS:
        raise ValueError(f"--lengths holds {sum(lengths)} tokens, {_MOST_TOKENS} at most")
    return Plan.from_nodes(tree, lengths, nodes)


def _check_flags(args: argparse.Namespace) -> None:
    check_ranges(args, _RANGES)
    if args.heads % args.kv_heads:
        raise ValueError(f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}")
    if args.ring_degree is not None and args.backend not in ("usp", "gather"):
        raise ValueError(f"--ring-degree {args.ring_degree} needs --backend usp or gather")
    if args.window is not None and args.full_mask:
        raise ValueError(f"--window {args.window} is for causal masks, not for --full-mask")


def split_nodes(plan: Plan, args: argparse.Namespace) -> Plan:
    """The plan with every node above degree 1 split as the flags say.

    Raises:
        ValueError: a node cannot be split so, or its heads do not divide.
    """
    splits = {}
    for node in plan.active_nodes():
        degree = plan.tree.degree(node)
        if degree > 1:
            split = _split(degree, args)
            split.validate(degree)
            splits[0, node] = split
    plan = replace(plan, splits=splits)
    try:
        plan.check_heads(args.heads, args.kv_heads)
    except ValueError as error:
        raise ValueError(f"--heads and --kv-heads: {error}") from error
    return plan


def _split(degree: int, args: argparse.Namespace) -> Split:
    if args.backend == "ulysses":
        return ULYSSES
    if args.backend == "ring":
        return Split(degree)
    (backend,) = backends_of(args.backend)
    if args.ring_degree is not None:
        return Split(min(args.ring_degree, degree), backend.name)
    return next(
        Split(members, backend.name)
        for members in range(2, degree + 1)
        if degree % members == 0 and is_admissible(degree // members, args.heads, args.kv_heads)
    )


def run(args: argparse.Namespace) -> int:
    """Runs the check; 0 when errors and traffic are right, 1 when not, 3 when a rank failed.

    Raises:
        ValueError: the flags do not describe a plan.
    """
    if args.kv_heads is None:
        args.kv_heads = args.heads
    _check_flags(args)
    plan = split_nodes(forced_plan(args), args)
    from megatron_nsp.testing.ranks import RankError
    from megatron_nsp.testing.verify import TOLERANCE, AttentionCase, check_cases

    case = AttentionCase(
        plan,
        args.heads,
        args.kv_heads,
        args.head_dim,
        dtype=args.dtype,
        overlap=not args.no_overlap,
        seed=args.seed,
        value_dim=args.value_dim,
        is_causal=not args.full_mask,
        window_left=args.window,
        has_sinks=args.sinks,
    )
    try:
        result = check_cases([case], timeout_s=args.timeout)[0]
    except RankError as error:
        # Which rank, and the last line of its traceback: what happened.
        lines = str(error).strip().splitlines()
        print("megatron-nsp verify:", *dict.fromkeys((lines[0], lines[-1])), file=sys.stderr)
        return FAILED
    tolerance = TOLERANCE[args.dtype]
    is_right = result.is_right(tolerance)
    report = {
        "errors": result.errors,
        "off_most_at": {name: str(place) for name, place in result.places.items()},
        "tolerance": tolerance,
        "collectives": result.num_collectives,
        "predicted_collectives": result.predicted_collectives,
        "sent_bytes": result.sent_bytes,
        "predicted_bytes": result.predicted_bytes,
        "max_in_flight": result.max_in_flight,
        "is_right": is_right,
    }
    print(json.dumps(report) if args.json else _table(report, plan))
    return 0 if is_right else 1


def _table(report: dict, plan: Plan) -> str:
    lines = [f"largest relative error (tolerance {report['tolerance']:g})"]
    for name, error in report["errors"].items():
        lines.append(f"  {name:5} {error:.2e}")
        if not error <= report["tolerance"]:
            lines[-1] += f", most at {report['off_most_at'][name]}"
    lines.append("rank  tokens  all-to-alls (predicted)   bytes sent (predicted)")
    rows = zip(
        plan.token_load().tolist(),
        report["collectives"],
        report["predicted_collectives"],
        report["sent_bytes"],
        report["predicted_bytes"],
        strict=True,
    )
    for rank, (tokens, count, predicted, sent, predicted_sent) in enumerate(rows):
        lines.append(
            f"{rank:4}  {tokens:6}  {count:11} ({predicted})  {sent:18} ({predicted_sent})"
        )
    lines.append("right" if report["is_right"] else "WRONG")
    return "\n".join(lines)
