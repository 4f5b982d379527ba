"""Pure tests of the SP tree. Case A1."""

import functools
import operator

import numpy as np
import pytest

from megatron_nsp.plan.tree import Node, SPTree


@pytest.mark.parametrize("max_degree", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_a1_every_depth_partitions_the_ranks(num_ranks: int, max_degree: int) -> None:
    if num_ranks % max_degree:
        with pytest.raises(
            ValueError, match=f"degree {max_degree} does not divide the {num_ranks}"
        ):
            SPTree.powers_of_two(num_ranks, max_degree)
        return
    tree = SPTree.powers_of_two(num_ranks, max_degree)
    for depth, degree in enumerate(reversed(tree.degrees)):
        blocks = [list(tree.ranks(node)) for node in tree.nodes() if node.depth == depth]
        assert all(len(block) == degree and block[0] % degree == 0 for block in blocks)
        assert functools.reduce(operator.iadd, blocks, []) == list(range(num_ranks))


def test_a1_six_ranks_and_degree_four_are_refused_but_twelve_make_three_trees() -> None:
    with pytest.raises(ValueError, match="degree 4 does not divide the 6 ranks"):
        SPTree.powers_of_two(6, 4)
    roots = [node for node in SPTree.powers_of_two(12, 4).nodes() if node.depth == 0]
    assert roots == [Node(0, 0), Node(0, 1), Node(0, 2)]


@pytest.mark.parametrize(
    ("num_ranks", "degrees"), [(12, (1, 3, 6, 12)), (12, (1, 2, 6)), (8, (1, 8))]
)
def test_relations_agree_with_rank_sets(num_ranks: int, degrees: tuple[int, ...]) -> None:
    tree = SPTree(num_ranks, degrees)
    for node in tree.nodes():
        inside = sorted(rank for child in tree.children(node) for rank in tree.ranks(child))
        assert inside in ([], list(tree.ranks(node)))
        assert all(tree.parent(child) == node for child in tree.children(node))
        assert all(node in tree.path(rank) for rank in tree.ranks(node))
        assert tree.node(tree.degree(node), node.index) == node
        assert tree.label(node) == f"{len(tree.ranks(node))}:{node.index}"
    for rank in range(num_ranks):
        degrees_on_path = [tree.degree(node) for node in tree.path(rank)]
        assert degrees_on_path == sorted(degrees, reverse=True)


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "message"),
    [
        (0, (1,), "the number of ranks must be at least 1, got 0"),
        (4, (2, 4), r"a chain of degrees starts with 1, got \[2, 4\]"),
        (4, (), r"a chain of degrees starts with 1, got \[\]"),
        (12, (1, 4, 6), r"each degree must divide the next larger one: 4 and 6 in \[1, 4, 6\]"),
        (4, (1, 1, 2), r"each degree must divide the next larger one: 1 and 1 in \[1, 1, 2\]"),
        (8, (1, 3), "degree 3 does not divide the 8 ranks of the domain"),
    ],
)
def test_bad_chains_name_both_numbers(
    num_ranks: int, degrees: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SPTree(num_ranks, degrees)


def test_max_degree_must_be_a_power_of_two_and_defaults_to_what_divides() -> None:
    with pytest.raises(ValueError, match="power of two, got 6 on 12"):
        SPTree.powers_of_two(12, 6)
    assert SPTree.powers_of_two(12).degrees == (1, 2, 4)
    assert SPTree.powers_of_two(7).degrees == (1,)


def test_unknown_nodes_are_refused() -> None:
    tree = SPTree(8, (1, 2, 4))
    with pytest.raises(ValueError, match="node 4:2 does not exist: 8 ranks hold 2"):
        tree.node(4, 2)
    with pytest.raises(ValueError, match=r"degree 8 is not in the chain \[1, 2, 4\]"):
        tree.node(8, 0)


def test_columns_count_along_the_chain_and_depths_from_the_root() -> None:
    tree = SPTree(12, (1, 3, 6))
    for column, degree in enumerate(tree.degrees):
        assert tree.degree_at(tree.depth_of_column(column)) == degree
        assert tree.column_of_depth(tree.node(degree, 0).depth) == column
    assert tree.column_of_depth(np.array([0, 2, 1, 0])).tolist() == [2, 0, 1, 2]
    assert tree.depth_of_column(np.array([2, 0, 1])).tolist() == [0, 2, 1]
