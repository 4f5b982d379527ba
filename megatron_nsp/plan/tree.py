"""The SP tree: which groups of ranks may share one sample (NSP paper, definition 1).

The domain has P ranks, numbered 0..P-1. A chain of degrees 1 = d_0 | d_1 | ... | d_K, each dividing
the next, defines the nodes: a node of degree d is an aligned block of d consecutive ranks. When d_K
is smaller than P the tree is a forest of P / d_K trees.

Plans name a degree by its depth, which counts from the root; arrays of what samples cost have one
column a degree, in the order of the chain, so that columns count from the leaves:

    P = 8, degrees (1, 2, 4):      depth 0   column 2   [0 1 2 3]     [4 5 6 7]
                                   depth 1   column 1   [0 1] [2 3]   [4 5] [6 7]
                                   depth 2   column 0   0  1  2  3    4  5  6  7

`SPTree.column_of_depth` and `SPTree.depth_of_column` turn one into the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_nsp.plan.arrays import IntArray


class Node(NamedTuple):
    """One aligned block of ranks: the `index`-th block at `depth` (0 = root)."""

    depth: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no one asks a node for


@dataclass(frozen=True)
class SPTree:
    """All nodes over `num_ranks` ranks for one chain of degrees.

    Args:
        num_ranks: ranks in the domain (P).
        degrees: the chain, ascending, starting with 1; each degree divides the next and the last
            divides `num_ranks`.

    Raises:
        ValueError: the chain breaks one of these rules; the message names both numbers.
    """

    num_ranks: int
    degrees: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuses chains that would leave a node with fewer ranks than its degree."""
        if self.num_ranks < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {self.num_ranks}")
        if not self.degrees or self.degrees[0] != 1:
            raise ValueError(f"a chain of degrees starts with 1, got {list(self.degrees)}")
        for small, large in zip(self.degrees, self.degrees[1:], strict=False):
            if large <= small or large % small:
                raise ValueError(
                    f"each degree must divide the next larger one: {small} and {large} in "
                    f"{list(self.degrees)}"
                )
        if self.num_ranks % self.degrees[-1]:
            raise ValueError(
                f"degree {self.degrees[-1]} does not divide the {self.num_ranks} ranks"
                " of the domain"
            )

    @classmethod
    def powers_of_two(cls, num_ranks: int, max_degree: int | None = None) -> "SPTree":
        """The default chain 1, 2, 4, ... up to `max_degree`.

        Without `max_degree` the chain ends with the largest power of two that divides `num_ranks`.

        Raises:
            ValueError: `max_degree` is no power of two, or does not divide `num_ranks`.
        """
        if max_degree is None:
            max_degree = max(1, num_ranks & -num_ranks)
        if max_degree < 1 or max_degree & (max_degree - 1):
            raise ValueError(
                f"the largest degree must be a power of two, got {max_degree} on {num_ranks} ranks;"
                " name other chains degree by degree"
            )
        return cls(num_ranks, tuple(1 << i for i in range(max_degree.bit_length())))

    @property
    def num_depths(self) -> int:
        """Length of every root-to-leaf path."""
        return len(self.degrees)

    @property
    def max_degree(self) -> int:
        """Degree of a root."""
        return self.degrees[-1]

    def degree_at(self, depth: int) -> int:
        """Degree of the nodes at `depth`."""
        return self.degrees[self.column_of_depth(depth)]

    def column_of_depth[Depth: (int, IntArray)](self, depth: Depth) -> Depth:
        """Columns of the degrees at these depths; column k is `degrees[k]`."""
        return self.num_depths - 1 - depth

    def depth_of_column[Column: (int, IntArray)](self, column: Column) -> Column:
        """Depths of the degrees of these columns."""
        return self.num_depths - 1 - column

    def depth_of(self, degree: int) -> int:
        """Depth of the nodes of `degree`.

        Raises:
            ValueError: the chain has no such degree.
        """
        if degree not in self.degrees:
            raise ValueError(f"degree {degree} is not in the chain {list(self.degrees)}")
        return self.depth_of_column(self.degrees.index(degree))

    def node(self, degree: int, index: int) -> Node:
        """The `index`-th node of `degree`.

        Raises:
            ValueError: there is no such degree or no such node.
        """
        depth = self.depth_of(degree)
        if not 0 <= index < self.num_nodes(depth):
            raise ValueError(
                f"node {degree}:{index} does not exist: {self.num_ranks} ranks hold "
                f"{self.num_nodes(depth)} nodes of degree {degree}"
            )
        return Node(depth, index)

    def num_nodes(self, depth: int) -> int:
        """Number of nodes at `depth`."""
        return self.num_ranks // self.degree_at(depth)

    def degree(self, node: Node) -> int:
        """Number of ranks of `node`."""
        return self.degree_at(node.depth)

    def ranks(self, node: Node) -> range:
        """The consecutive ranks of `node`."""
        degree = self.degree(node)
        return range(node.index * degree, (node.index + 1) * degree)

    def node_at(self, depth: int, rank: int) -> Node:
        """The node at `depth` that holds `rank`."""
        return Node(depth, rank // self.degree_at(depth))

    def path(self, rank: int) -> tuple[Node, ...]:
        """The nodes that hold `rank`, root first."""
        return tuple(self.node_at(depth, rank) for depth in range(self.num_depths))

    def parent(self, node: Node) -> Node | None:
        """The next larger node around `node`; None for a root."""
        return None if node.depth == 0 else self.node_at(node.depth - 1, self.ranks(node)[0])

    def children(self, node: Node) -> tuple[Node, ...]:
        """The next smaller nodes inside `node`, by rank; empty for a leaf."""
        if node.depth == self.num_depths - 1:
            return ()
        step = self.degree_at(node.depth + 1)
        return tuple(self.node_at(node.depth + 1, rank) for rank in self.ranks(node)[::step])

    def nodes(self) -> Iterator[Node]:
        """Every node, roots first, by index within a depth: the one fixed order."""
        for depth in range(self.num_depths):
            for index in range(self.num_nodes(depth)):
                yield Node(depth, index)

    def label(self, node: Node) -> str:
        """`degree:index`, as the command line writes a node."""
        return f"{self.degree(node)}:{node.index}"
