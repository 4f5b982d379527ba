"""What flags alone do not decide: whether they fit the profile and the documents of a job.

Each check raises ValueError with one line that names the flag and the numbers; all ranks come to
the same verdict, since they look at the same flags and the same index file.
"""

import argparse
from dataclasses import replace

from megatron_nsp.config import NSPConfig, build_tree, flag
from megatron_nsp.cost.profile import Profile
from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.sizes import domain_size, heads_per_rank
from megatron_nsp.plan.heads import is_admissible
from megatron_nsp.plan.static_layout import static_groups
from megatron_nsp.plan.tree import SPTree


def check_lengths(
    config: NSPConfig,
    documents: Documents,
    max_length: int,
    tree: SPTree,
    is_chunked: bool,
) -> None:
    """Checks documents against the longest length and the token budget.

    Args:
        config: the settings.
        documents: the documents.
        max_length: longest sample to train on, in tokens.
        tree: the SP tree.
        is_chunked: whether nodes of the largest degree always have ring members, which hold two
            chunks of a sample.

    Raises:
        ValueError: names the document, its length and the limit.
    """
    lengths, data_flag = documents.lengths, documents.flag
    over_long = (lengths > max_length).nonzero()[0]
    if config.over_long == "error" and len(over_long):
        first = int(over_long[0])
        raise ValueError(
            f"document {first} of {data_flag} has {lengths[first]} tokens, over "
            f"{flag('max_length')} {max_length}; {len(over_long)} of {len(lengths)} documents are"
        )
    usable = lengths[(lengths > 0) & (lengths <= max_length)]
    if not len(usable):
        raise ValueError(
            f"{data_flag} holds no document to train on: {len(lengths)} documents, none with 1 to "
            f"{max_length} tokens"
        )
    longest = int(usable.max())
    chunks = 2 if is_chunked else 1
    needed = chunks * -(-longest // (chunks * tree.max_degree))
    if config.token_budget is not None and needed > config.token_budget:
        raise ValueError(
            f"{flag('token_budget')} {config.token_budget} is too small: the longest sample of "
            f"{data_flag}, {longest} tokens, puts {needed} on a rank at the largest degree "
            f"{tree.max_degree}"
        )


def job_tree(args: argparse.Namespace, config: NSPConfig, profile: Profile) -> SPTree:
    """The SP tree of a job's flags.

    A profile that holds one model's times knows Ulysses alone, whose degrees heads limit.

    Raises:
        ValueError: the profile is of another backend, or degrees do not fit the ranks or the heads.
    """
    if profile.fitted is not None:
        if config.backend not in ("auto", "ulysses"):
            raise ValueError(
                f"{flag('backend')} must be auto or ulysses with {flag('profile')} {profile.name}, "
                f"which holds the times of one model with Ulysses, got {config.backend}"
            )
        config = replace(config, backend="ulysses")
    return build_tree(config, domain_size(args), *heads_per_rank(args))


def check_input_layout(config: NSPConfig, num_ranks: int) -> None:
    """Checks that the static groups of the input layout, if any, fit the domain.

    Raises:
        ValueError: names the flag, its degree and the ranks.
    """
    if config.static_degree is None:
        return
    try:
        static_groups(num_ranks, config.static_degree)
    except ValueError as error:
        raise ValueError(f"{flag('input_layout')} {config.input_layout}: {error}") from error


def is_always_chunked(config: NSPConfig, tree: SPTree, heads: tuple[int, int]) -> bool:
    """Whether nodes of the largest degree always have ring members."""
    if tree.max_degree == 1:
        return False
    return config.backend not in ("auto", "ulysses") or not is_admissible(tree.max_degree, *heads)
