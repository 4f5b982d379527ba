"""One thing that flags may not ask for, and the values from which it is told."""

import argparse
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_nsp.mcore.layers import recomputed
from megatron_nsp.mcore.sizes import (
    domain_size,
    kv_heads,
    longest_sample,
    micro_batch_group,
    num_micro_batches,
)
from megatron_nsp.mcore.stages import layers_of_a_rank, stage_error, virtual_stages


@dataclass(frozen=True)
class Refusal:
    """One thing that flags may not ask for.

    Attributes:
        flag: the flag that it is about, as one types it.
        condition: what is wrong, from the values of its parameters: names of `Values`. What it
            returns is `{found}` in the message; a false value refuses nothing.
        message: what the user reads, with names of `Values` in braces.
        reason: why, for the page.
        reads: the names whose values the condition takes, where its parameters do not say.
        absent: values of names that Megatron removes from its arguments when it validates them.
    """

    flag: str
    condition: Callable[..., Any]
    message: str
    reason: str
    reads: tuple[str, ...] = ()
    absent: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads off the condition's parameters what it reads."""
        if not self.reads:
            object.__setattr__(self, "reads", tuple(inspect.signature(self.condition).parameters))

    def of(self, values: "Values") -> str | None:
        """The message for a job, if it is refused."""
        found = self.condition(*(values.of(name, self) for name in self.reads))
        if not found:
            return None
        fields = {name: values.of(name, self) for name in self.reads}
        return self.message.format(found=found, **fields)


class Derived(NamedTuple):
    """A value that several flags make up.

    Attributes:
        reads: the arguments it is made from.
        of: makes it, from a namespace of those alone.
    """

    reads: tuple[str, ...]
    of: Callable[[Any], Any]


def idle_save_budget_gb(args: argparse.Namespace) -> float | None:
    """The save budget where no attention is computed again, so that nothing is saved by it."""
    budget: float = args.nsp_save_budget_gb
    return budget if budget and recomputed(args) == "none" else None


_DOMAIN = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")

_SHARES = (
    *("num_layers", "pipeline_model_parallel_size"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)

_CHUNKS = (
    *(*_SHARES, "hybrid_layer_pattern", "pipeline_model_parallel_layout", "mtp_num_layers"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
)

DERIVED: Mapping[str, Derived] = {
    "num_ranks": Derived(_DOMAIN, domain_size),
    "num_micro_batches": Derived(
        (
            *("global_batch_size", "micro_batch_size", "step_batch_size_schedule"),
            *("context_parallel_size", *_DOMAIN),
        ),
        num_micro_batches,
    ),
    "micro_batch_group": Derived(
        ("microbatch_group_size_per_vp_stage", "pipeline_model_parallel_size"), micro_batch_group
    ),
    "layers_of_a_rank": Derived(_SHARES, layers_of_a_rank),
    "virtual_stages": Derived(_CHUNKS, virtual_stages),
    "stage_error": Derived(
        (*_CHUNKS, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        stage_error,
    ),
    "kv_heads": Derived(
        ("num_attention_heads", "group_query_attention", "num_query_groups"), kv_heads
    ),
    "expert_tensor_ranks": Derived(
        ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        lambda args: args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    ),
    "longest": Derived(("nsp_max_length", "seq_length"), longest_sample),
    "idle_save_budget_gb": Derived(
        (
            *("nsp_save_budget_gb", "recompute_activations", "recompute_granularity"),
            *("recompute_modules", "recompute_method", "recompute_num_layers"),
        ),
        idle_save_budget_gb,
    ),
}
"""What rows may read beside arguments, by name."""


def arguments_of(name: str) -> tuple[str, ...]:
    """The arguments behind a name that a row reads."""
    return DERIVED[name].reads if name in DERIVED else (name,)


class Values:
    """The values that rows read.

    Args:
        args: Megatron's arguments, validated or not.
        more: values that no argument holds.
    """

    def __init__(self, args: argparse.Namespace, **more: Any) -> None:
        """Reads nothing yet."""
        self._args, self._more = vars(args), more

    def of(self, name: str, row: Refusal) -> Any:
        """The value of a name; `row` is the one that reads it.

        Raises:
            AssertionError: Megatron has no such argument.
        """
        if name in self._more:
            return self._more[name]
        values = {argument: self._argument(argument, row) for argument in arguments_of(name)}
        return DERIVED[name].of(argparse.Namespace(**values)) if name in DERIVED else values[name]

    def _argument(self, name: str, row: Refusal) -> Any:
        if name in self._args:
            return self._args[name]
        # A check that passes because Megatron renamed a flag would be a check no more.
        assert name in row.absent, f"this Megatron has no argument {name}: {row.flag} is unchecked"
        return row.absent[name]
