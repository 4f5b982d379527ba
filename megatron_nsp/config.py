"""What a user can set: one frozen dataclass, from which the command-line flags are generated."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from megatron_nsp.plan.backends import NodeHeads, backend_choices
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.split import possible_splits
from megatron_nsp.plan.tree import SPTree

RECOMPUTE = ("none", "selective", "full")
"""What a backward pass runs again, in Megatron's words: nothing, core attention, whole layers."""

OVER_LONG_POLICIES = ("filter", "error")
DEFAULT_DEGREE = 64
"""Where the default chain of degrees ends if heads do not end it: rings get long."""

MOST_TOKENS = 2**31 - 1
"""Positions and sequence boundaries are 32-bit numbers in every attention kernel."""


@dataclass(frozen=True)
class NSPConfig:
    """Settings of nested sequence parallelism; the flag of field `x_y` is `--nsp-x-y`.

    The string below each field is the help text of its flag.
    """

    max_degree: int | None = None
    """Largest degree of the default chain 1, 2, 4, ...; without it the largest power of two that
    divides the domain and that the attention heads allow, or 64 where heads limit no degree and
    allow less."""

    degrees: tuple[int, ...] | None = None
    """The whole chain of degrees instead, for example 1,3,6; each degree divides the next."""

    backend: str = "auto"
    """How the ranks of a node divide attention: 'ulysses' (heads, which must divide), 'ring'
    (tokens; keys travel from rank to rank), 'usp' (heads as far as they and hosts allow, tokens
    beyond), 'gather' (tokens; all keys are sent to all ranks), 'te-p2p' or 'te-a2a' (Transformer
    Engine's own ring, or its own exchange of heads, which must all divide), or 'auto', for each
    node what is fastest of all but those of Transformer Engine."""

    batch_tokens: int | None = None
    """Tokens of one optimizer step: whole samples are drawn until this many are reached; without it
    as many as Megatron's --global-batch-size samples of --seq-length hold."""

    max_length: int | None = None
    """Longest sample to train on, in tokens; without it Megatron's --seq-length."""

    over_long: str = "filter"
    """What to do with samples over the longest length: 'filter' leaves them out and counts them,
    'error' stops before the first step."""

    token_budget: int | None = None
    """Most tokens one rank may hold in one micro-batch (not multiplied by the degree): the guard of
    activation memory; without it no limit."""

    save_budget_gb: float = 0.0
    """Most gigabytes (1e9 bytes) of attention outputs that a rank saves, for each micro-batch in
    flight, instead of recomputing them where layers are recomputed; 0 saves none, inf all."""

    profile: str | None = None
    """Cost profile of the planner: the name of a built-in one or the path of a JSON file; without
    it cpu-gloo with --nsp-cpu and h100-ib otherwise, both estimates."""

    policy: str = "auto"
    """Which planner makes the plans: 'auto' (the search and every policy it is compared with, best
    of all), a policy by name, or file:PATH to replay recorded plans, one JSON plan a line."""

    plan_ahead: int = 2
    """Steps planned ahead of the training loop in the background; 0 plans inside the loop."""

    input_layout: str = "plan"
    """Layout in which data is read: 'plan' (every rank reads just its own tokens) or static:N, that
    of a loader that knows no plan: whole samples are dealt to fixed groups of N ranks, and one
    all-to-all a micro-batch takes tokens, labels and loss mask to the plan layout."""

    overlap: bool = True
    """Stream communication of one node under the compute of another; the bits are the same."""

    kernel: str = "auto"
    """Attention kernel: 'auto' (on GPUs the first installed of te, flash-attn-3, flash-attn-4 and
    flash-attn-2, else cuda-varlen; on CPU cpu-flash), 'cpu-flash', 'cuda-varlen' (torch's own),
    'flash-attn-2', 'flash-attn-3', 'flash-attn-4', 'reference', 'te' (Transformer Engine's fused
    attention) or 'te-module' (its DotProductAttention, which gives no LSE)."""

    record_plans: str | None = None
    """File to which rank 0 appends each step's plan as one line of JSON, for file:PATH."""

    cpu: bool = False
    """Run Megatron on CPU ranks over gloo: for trying out and for tests, never chosen silently."""

    check: int | None = field(default=None, metadata={"const": 0})
    """Check the command line, plan the first steps, say what the job would be and start nothing:
    on any machine, for so many ranks, or for the job's own without a number."""

    @property
    def static_degree(self) -> int | None:
        """N of the input layout static:N."""
        match = re.fullmatch(r"static:([1-9][0-9]{0,17})", self.input_layout)
        return int(match[1]) if match else None

    def validate(self) -> None:
        """Checks every field that needs no knowledge of the job.

        Raises:
            ValueError: one line that names the flag and the number.
        """
        for name in ("batch_tokens", "max_length", "token_budget", "max_degree"):
            check_range(flag(name), getattr(self, name), 1, MOST_TOKENS)
        check_range(flag("check"), self.check, 0)
        check_range(flag("plan_ahead"), self.plan_ahead, 0)
        check_range(flag("save_budget_gb"), self.save_budget_gb, 0)
        for name, known in (("over_long", OVER_LONG_POLICIES), ("backend", backend_choices())):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{flag(name)} must be one of {', '.join(known)}, got {value}")
        if self.input_layout != "plan" and self.static_degree is None:
            raise ValueError(
                f"{flag('input_layout')} must be plan or static:N with N at least 1, got "
                f"{self.input_layout}"
            )
        if self.degrees is not None and self.max_degree is not None:
            raise ValueError(
                f"{flag('degrees')} {list(self.degrees)} already says the largest degree, "
                f"{flag('max_degree')} {self.max_degree} must not be given too"
            )


def flag(field_name: str) -> str:
    """The command-line flag of a field of NSPConfig."""
    assert field_name in {field.name for field in fields(NSPConfig)}, f"{field_name=}"
    return "--nsp-" + field_name.replace("_", "-")


Range = tuple[float, float | None]
"""The least and the most that a number may be; None = no limit."""


def check_range(
    flag_name: str, value: float | None, least: float, most: float | None = None
) -> None:
    """Refuses a number outside its range; None was not given.

    Raises:
        ValueError: names the flag, the range and the number.
    """
    if value is None or (value >= least and (most is None or value <= most)):
        return
    limits = f"at least {least}" if most is None else f"{least} to {most}"
    raise ValueError(f"{flag_name} must be {limits}, got {value}")


def check_ranges(args: argparse.Namespace, ranges: Mapping[str, Range]) -> None:
    """Refuses parsed flags outside their ranges, which are given by destination.

    Raises:
        ValueError: see `check_range`.
    """
    for name, (least, most) in ranges.items():
        check_range("--" + name.replace("_", "-"), getattr(args, name), least, most)


def build_tree(
    config: NSPConfig, num_ranks: int, num_heads: int | None, num_kv_heads: int | None
) -> SPTree:
    """The SP tree of a job.

    Args:
        config: the settings.
        num_ranks: ranks of the data-parallel domain.
        num_heads: query heads on a tensor-parallel rank; None = heads limit no degree.
        num_kv_heads: key/value heads on a tensor-parallel rank.

    Raises:
        ValueError: a degree does not divide the ranks, or the heads where only heads may be split;
            names flag and numbers.
    """
    chosen = "degrees" if config.degrees is not None else "max_degree"
    try:
        if config.degrees is not None:
            tree = SPTree(num_ranks, config.degrees)
        else:
            tree = SPTree.powers_of_two(num_ranks, config.max_degree)
    except ValueError as error:
        raise ValueError(f"{flag(chosen)}: {error}") from error
    if num_heads is None or num_kv_heads is None:
        return tree
    served = tuple(
        degree
        for degree in tree.degrees
        if possible_splits(config.backend, NodeHeads(degree, num_heads, num_kv_heads))
    )
    if config.degrees is None and config.max_degree is None:
        divided = (d for d in tree.degrees if is_admissible(d, num_heads, num_kv_heads))
        most = max(*divided, DEFAULT_DEGREE)
        return SPTree(num_ranks, tuple(degree for degree in served if degree <= most))
    for degree in tree.degrees:
        if degree not in served:
            raise ValueError(
                f"{flag(chosen)}: degree {degree} cannot split {num_heads} query and "
                f"{num_kv_heads} key/value heads evenly, as {flag('backend')} {config.backend} must"
            )
    return tree
