"""In which order a rank runs the nodes of its path (NSP paper, section 4.2).

Exchanges of the first node have no compute before them to hide under, those of the last none behind
them. Which nodes these are is a choice: an order of depths, one for all ranks of a tree, so that
members of a node agree on it.

Not every order is safe. Members of a node share that node and its ancestors, and between two nodes
that one rank runs next to each other another may have a deeper node of its own; their schedules
then list shared collectives differently and wait for one another for ever:

    order 0 2 1    ranks with a node at depth 2    P0 P2 E0 P1 E2 E1
                   ranks without one               P0 P1 E0 E1

So each depth goes to one end of the shallower ones: what ranks share is then one unbroken run of
nodes in all of their lists. Where depths 0, 1, 2 are active that leaves

    0 1 2    1 0 2    2 0 1    2 1 0
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.tree import Node, SPTree

Order = tuple[int, ...]
"""Depths, first to last; what is not among them runs behind them, root first."""

ROOT_FIRST: Order = ()

MAX_CHOICES = 3
"""Depths that are tried at both ends, the deepest; the others stay root first."""


def safe_orders(depths: Sequence[int]) -> tuple[Order, ...]:
    """Orders in which the ranks of a tree may run these depths, root first before all others.

    Args:
        depths: the active depths, ascending.
    """
    orders: list[Order] = [tuple(depths[: max(1, len(depths) - MAX_CHOICES)])]
    for depth in depths[len(orders[0]) :]:
        orders = [new for order in orders for new in ((*order, depth), (depth, *order))]
    return tuple(orders)


def in_order(path: Iterable[Node], order: Order) -> list[Node]:
    """The nodes of a path, root first, in another order."""
    nodes = sorted(path)
    if not nodes:
        return nodes
    return sorted(nodes, key=lambda node: whole_order(order, nodes[-1].depth + 1).index(node.depth))


def whole_order(order: Order, num_depths: int) -> Order:
    """The order with all depths of a tree in it."""
    return (*order, *(depth for depth in range(num_depths) if depth not in order))


@dataclass(frozen=True)
class NodeOrders:
    """The orders of a step.

    Attributes:
        order_of: by micro-batch, pass and tree; root first for what is not there.
    """

    order_of: Mapping[tuple[int, Pass, int], Order] = field(default_factory=dict)

    def of_tree(self, micro_batch: int, tree_index: int) -> dict[Pass, Order]:
        """The orders of one tree of the forest in one micro-batch."""
        return {
            pass_: self.order_of.get((micro_batch, pass_, tree_index), ROOT_FIRST) for pass_ in Pass
        }

    def of_rank(self, micro_batch: int, tree: SPTree, rank: int) -> dict[Pass, Order]:
        """The orders of the tree that holds a rank."""
        return self.of_tree(micro_batch, rank // tree.max_degree)

    @property
    def text(self) -> str:
        """All of it as text, the same for equal orders: for a digest."""
        return repr(
            sorted((key[0], key[1].value, key[2], order) for key, order in self.order_of.items())
        )


ALL_ROOT_FIRST = NodeOrders()
