"""The communicators of the tree: one process group a node, made once, in one order, on every rank.

Creating a group is a call for all ranks of the job, so every rank walks every node of every domain
in the same order, whether it belongs to the node or not. A rank then belongs to one group a depth.
Nodes of degree 1 have no group: they exchange with nobody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_nsp.plan.tree import Node, SPTree

NewGroup = Callable[[list[int]], dist.ProcessGroup | None]


@dataclass(frozen=True, eq=False)
class NestedGroups:
    """The groups one rank belongs to.

    Attributes:
        tree: the SP tree of the domain.
        rank: this rank in the domain.
        num_creations: groups created by the whole job, over all domains.
    """

    tree: SPTree
    rank: int
    num_creations: int
    _group_of: dict[Node, dist.ProcessGroup]

    @classmethod
    def create(
        cls, tree: SPTree, domains: Sequence[Sequence[int]], new_group: NewGroup | None = None
    ) -> "NestedGroups":
        """Creates the groups of every domain; a collective call for all ranks of the job.

        Args:
            tree: the SP tree; every domain has its number of ranks.
            domains: the global ranks of each domain, in the domain's rank order.
            new_group: makes a group of global ranks, `torch.distributed.new_group` by default.

        Raises:
            ValueError: a domain's size is not the tree's, or this rank is in no domain.
        """
        make_group: Callable[..., Any] = new_group or dist.new_group
        for domain in domains:
            if len(domain) != tree.num_ranks:
                raise ValueError(f"a domain has {len(domain)} ranks, the tree {tree.num_ranks}")
        global_rank = dist.get_rank()
        own = [list(domain) for domain in domains if global_rank in domain]
        if len(own) != 1:
            raise ValueError(f"global rank {global_rank} is in {len(own)} domains, must be in 1")
        rank, num_creations = own[0].index(global_rank), 0
        group_of: dict[Node, dist.ProcessGroup] = {}
        for node in tree.nodes():
            if tree.degree(node) == 1:
                continue
            for domain in domains:
                group = make_group([domain[member] for member in tree.ranks(node)])
                num_creations += 1
                if global_rank in domain and rank in tree.ranks(node):
                    assert group is not None, f"no group for {node=} on {global_rank=}"
                    group_of[node] = group
        return cls(tree, rank, num_creations, group_of)

    @property
    def num_groups(self) -> int:
        """Groups this rank belongs to."""
        return len(self._group_of)

    def group(self, node: Node) -> dist.ProcessGroup | None:
        """The group of a node on this rank's path; None for a node of one rank."""
        return None if self.tree.degree(node) == 1 else self._group_of[node]

    def warm_up(self, device: torch.device) -> None:
        """Runs one tiny all-to-all in every group, root first, so that step 0 connects nothing.

        Every rank of the domain must call it.
        """
        for node in sorted(self._group_of):
            degree = self.tree.degree(node)
            send = torch.full((degree,), self.rank, dtype=torch.int32, device=device)
            received = torch.empty_like(send)
            dist.all_to_all_single(received, send, group=self._group_of[node])
            assert received.tolist() == list(self.tree.ranks(node)), f"{node=} {received=}"

    def destroy(self) -> None:
        """Destroys this rank's groups."""
        for node in sorted(self._group_of):
            dist.destroy_process_group(self._group_of[node])
        self._group_of.clear()
