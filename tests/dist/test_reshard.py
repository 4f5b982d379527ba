"""Reshard between the static and the plan layout on gloo ranks. Case C5, and gradients in fp64."""

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.layout import RankLayout, rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.static_layout import static_layout
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.reshard import ReshardMap, to_plan, to_static
from megatron_nsp.testing.logging_group import CollectiveLog, LoggingGroup
from megatron_nsp.testing.random_plans import random_step
from megatron_nsp.testing.ranks import run_ranks


class Case(NamedTuple):
    """One reshard of every rank."""

    plan: Plan
    micro_batch: int
    static_degree: int
    row_multiple: int


def random_cases(count: int, num_ranks: int) -> list[Case]:
    rng, cases = random.Random(6), []
    for _ in range(count):
        plan = random_step(rng, num_ranks)
        micro_batch = rng.randrange(plan.num_micro_batches)
        cases.append(Case(plan, micro_batch, rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4))))
    return cases


def numbers(layout: RankLayout, plan: Plan) -> Tensor:
    return torch.from_numpy(layout.token_numbers(plan.lengths))


def tokens(numbers: Tensor) -> Tensor:
    return numbers * 7919 % 50_021


def embeddings(numbers: Tensor) -> Tensor:
    """`[n, 1, 3]` the same on every rank for the same token; no two alike."""
    generator = torch.Generator().manual_seed(11)
    table = torch.randn(2000, 1, 3, generator=generator)
    return table[numbers]


def check_case(rank: int, case: Case, group: LoggingGroup, log: CollectiveLog) -> int:
    """Both ways, forward and backward, bit for bit; returns the rank's tokens in the plan."""
    plan, micro_batch, degree, row_multiple = case
    reshard_map = ReshardMap.build(plan, micro_batch, rank, degree, row_multiple)
    static = numbers(static_layout(plan, rank, degree, micro_batch), plan)
    layout = rank_layout(plan, rank, micro_batch, row_multiple)
    planned, num_filler = numbers(layout, plan), layout.num_filler_tokens

    def filled(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(num_filler, *x.shape[1:])])

    log.clear()
    assert to_plan(tokens(static), reshard_map, group).equal(filled(tokens(planned)))
    assert len(log.records) == 1
    assert log.records[0].send_rows == reshard_map.static.counts
    assert log.records[0].recv_rows == reshard_map.plan.counts

    # There and back; the gradient of what came back is a token's own, so it comes back too.
    x = embeddings(static).requires_grad_()
    x_plan = to_plan(x, reshard_map, group)
    x_plan.retain_grad()
    back = to_static(x_plan, reshard_map, group)
    assert x_plan.equal(filled(embeddings(planned))) and back.equal(x)
    log.clear()
    back.backward(embeddings(static + 500))
    assert len(log.records) == 2  # one for each of the two functions
    assert x_plan.grad.equal(filled(embeddings(planned + 500)))
    assert x.grad.equal(embeddings(static + 500))

    # Filler rows: whatever the ranks computed there is dropped, and gets no gradient.
    losses = filled(embeddings(planned)[:, 0, 0])
    losses[len(planned) :] = float("nan")
    losses.requires_grad_()
    losses_static = to_static(losses, reshard_map, group)
    assert losses_static.equal(embeddings(static)[:, 0, 0])
    losses_static.backward(embeddings(static + 500)[:, 0, 0])
    assert losses.grad.equal(filled(embeddings(planned + 500)[:, 0, 0]))
    return len(planned) and len(static)


def check_cases(rank: int, cases: list[Case]) -> list[int]:
    log = CollectiveLog()
    group = LoggingGroup(dist.group.WORLD, log)
    return [check_case(rank, case, group, log) for case in cases]


def test_c5_200_random_plans_go_over_and_come_back_bit_for_bit() -> None:
    held = run_ranks(8, check_cases, random_cases(200, 8), timeout_s=120)
    assert any(0 in ranks for ranks in zip(*held, strict=True))  # ranks without tokens took part


def test_a_domain_of_one_rank() -> None:
    plan = Plan.from_nodes(SPTree(1, (1,)), [3, 5], [SPTree(1, (1,)).node(1, 0)] * 2)
    run_ranks(1, check_cases, [Case(plan, 0, 1, 4)])


class SumOverRanks(torch.autograd.Function):
    """Makes every rank's function the sum of all ranks' functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return SameOnAllRanks.apply(grad)


class SameOnAllRanks(torch.autograd.Function):
    """An input that all ranks share: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return SumOverRanks.apply(grad)


def check_gradients(rank: int) -> None:
    """All ranks perturb the same element of the whole batch, so finite differences mean something.

    Each takes its own rows of it, the other layout's rows come out on all ranks again.
    """
    tree = SPTree(2, (1, 2))
    plan = Plan.from_nodes(tree, [5, 2, 3], [tree.node(2, 0), tree.node(2, 0), tree.node(1, 1)])
    for degree in (1, 2):
        reshard_map = ReshardMap.build(plan, 0, rank, degree, row_multiple=4)
        static = numbers(static_layout(plan, rank, degree), plan)
        layout = rank_layout(plan, rank, row_multiple=4)
        planned = numbers(layout, plan)
        pad = torch.zeros(layout.num_filler_tokens, 2, dtype=torch.float64)

        def over(whole: Tensor, reshard_map=reshard_map, static=static, planned=planned) -> Tensor:
            own = SameOnAllRanks.apply(whole)[static]
            x_plan = to_plan(own, reshard_map, dist.group.WORLD)[: len(planned)]
            return SumOverRanks.apply(torch.zeros_like(whole).index_add(0, planned, x_plan.sin()))

        def back(
            whole: Tensor, reshard_map=reshard_map, static=static, planned=planned, pad=pad
        ) -> Tensor:
            own = torch.cat([SameOnAllRanks.apply(whole)[planned], pad])
            x_static = to_static(own, reshard_map, dist.group.WORLD)
            return SumOverRanks.apply(torch.zeros_like(whole).index_add(0, static, x_static.sin()))

        generator = torch.Generator().manual_seed(degree)
        whole = torch.randn(10, 2, dtype=torch.float64, generator=generator, requires_grad=True)
        for function in (over, back):
            assert torch.autograd.gradcheck(function, (whole,))
            assert torch.autograd.gradgradcheck(function, (whole,))


def test_gradients_equal_finite_differences_in_float64() -> None:
    run_ranks(2, check_gradients)


def check_refusals(rank: int) -> None:
    tree, world = SPTree(2, (1, 2)), dist.group.WORLD
    plan = Plan.from_nodes(tree, [5, 2], [tree.node(2, 0), tree.node(1, 0)])
    own = ReshardMap.build(plan, 0, rank, 2)
    with pytest.raises(
        ValueError, match=f"to_plan got 9 rows, the map gives rank {rank} {3 + rank}"
    ):
        to_plan(torch.zeros(9), own, world)
    with pytest.raises(ValueError, match=f"to_static got 9 rows, the map gives rank {rank} "):
        to_static(torch.zeros(9), own, world)
    other = ReshardMap.build(plan, 0, 1 - rank, 2)
    x = torch.zeros(other.static.buffer_tokens)
    with pytest.raises(
        ValueError, match=f"this is rank {rank} of 2, a map for rank {1 - rank} of 2"
    ):
        to_plan(x, other, world)


def test_a_tensor_or_a_group_that_is_not_the_maps_is_refused() -> None:
    run_ranks(2, check_refusals)
