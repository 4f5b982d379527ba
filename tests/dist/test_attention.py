"""Nested attention on gloo ranks against the oracle, fp64, many cases a launch.

Cases B1, B2, C1, C2, C5, D1, D3, H1, I1, I2 and J2 of docs/cases.md, as far as attention goes.
"""

import random

import pytest
import torch

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.runtime.attention import NestedBatch, nested_attention
from megatron_nsp.runtime.groups import NestedGroups
from megatron_nsp.runtime.kernels import AttentionMask
from megatron_nsp.testing.logging_group import CollectiveLog, logged_new_group
from megatron_nsp.testing.random_plans import random_lengths, random_plan, random_tree
from megatron_nsp.testing.ranks import RankError, run_ranks
from megatron_nsp.testing.runtime import CPU, local_runtime
from megatron_nsp.testing.verify import AttentionCase, check_cases

HEADS = ((8, 8), (8, 4), (8, 2), (8, 1), (12, 12), (12, 3), (12, 1), (6, 2), (24, 24))
TREE = SPTree(8, (1, 2, 4, 8))


def forced(tree: SPTree, samples: list[tuple[int, int, int]]) -> Plan:
    """A plan from (length, degree, index) of each sample."""
    nodes = [tree.node(degree, index) for _, degree, index in samples]
    return Plan.from_nodes(tree, [length for length, _, _ in samples], nodes)


def test_300_random_plans_equal_the_oracle_and_the_predicted_traffic() -> None:
    rng, cases = random.Random(7), []
    for seed in range(300):
        heads, kv_heads = rng.choice(HEADS)
        tree = random_tree(rng, 8, heads, kv_heads)
        plan = random_plan(rng, tree, random_lengths(rng, 8, 90))
        cases.append(
            AttentionCase(
                plan, heads, kv_heads, 8, overlap=seed % 3 > 0, seed=seed, row_multiple=1 + seed % 4
            )
        )
    results = check_cases(cases, timeout_s=120)
    wrong = [
        (case.plan.to_dict(), result.errors)
        for case, result in zip(cases, results, strict=True)
        if not result.is_right(1e-10)
    ]
    assert not wrong, wrong[:2]
    assert {result.max_in_flight for result in results} == {0, 1}
    assert any(0 in case.plan.token_load() for case in cases)  # ranks without tokens took part
    assert {len(set(case.plan.depth.tolist())) for case in cases} >= {1, 2, 3}


def named_cases() -> dict[str, AttentionCase]:
    b1 = forced(TREE, [(2048, 8, 0), (33, 2, 1), (5, 1, 6)])
    c1 = [(7, 0), (5, 0), (3, 0)]
    short = [(length, 8, 0) for length in (1, 2, 3, 7, 8, 9, 15, 16, 17)]
    four_trees = SPTree(8, (1, 2))
    return {
        "b1 fewer kv heads than ranks": AttentionCase(b1, 8, 2, 16),
        "b1 one kv head": AttentionCase(b1, 8, 1, 16),
        "b2 28 and 7 heads, leaves": AttentionCase(forced(TREE, [(40, 1, 3), (9, 1, 0)]), 28, 7, 8),
        "b2 12 and 12 heads": AttentionCase(forced(TREE, [(40, 4, 1), (9, 2, 0)]), 12, 12, 8),
        "c1 degree 2": AttentionCase(forced(TREE, [(n, 2, i) for n, i in c1]), 8, 8, 8),
        "c1 degree 4": AttentionCase(forced(TREE, [(n, 4, i) for n, i in c1]), 8, 8, 8),
        "c2 shorter than the degree": AttentionCase(forced(TREE, short), 8, 8, 8),
        "d1 a leaf sharing rank 0": AttentionCase(
            forced(TREE, [(5, 2, 0), (11, 2, 0), (6, 1, 0)]), 8, 8, 8
        ),
        "j2 work only on ranks 4 to 7": AttentionCase(
            forced(four_trees, [(9, 2, 2), (6, 2, 3), (4, 1, 5)]), 8, 2, 8
        ),
        "chain 1,3,6": AttentionCase(
            forced(SPTree(6, (1, 3, 6)), [(50, 6, 0), (20, 3, 1), (7, 1, 2)]), 12, 3, 8
        ),
        "one token on one of eight ranks": AttentionCase(forced(TREE, [(1, 1, 3)]), 8, 2, 8),
        "one token over eight ranks": AttentionCase(forced(TREE, [(1, 8, 0)]), 8, 2, 8),
    }


def test_named_cases_equal_the_oracle() -> None:
    cases = named_cases()
    results = check_cases(list(cases.values()))
    for (name, _), result in zip(cases.items(), results, strict=True):
        assert result.is_right(1e-10), (name, result)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_lower_precision(dtype: str, tolerance: float) -> None:
    plan = forced(TREE, [(300, 8, 0), (70, 4, 1), (40, 2, 0), (33, 1, 5)])
    case = AttentionCase(plan, 8, 2, 32, dtype=dtype)
    assert check_cases([case])[0].is_right(tolerance)


def test_all_leaves_send_nothing() -> None:
    plan = forced(TREE, [(20 + i, 1, i % 8) for i in range(16)])
    result = check_cases([AttentionCase(plan, 8, 8, 8)])[0]
    assert result.num_collectives == result.sent_bytes == [0] * 8


def test_i2_members_of_a_group_log_the_same_list() -> None:
    rng = random.Random(9)
    plans = [random_plan(rng, TREE, random_lengths(rng, 8, 90)) for _ in range(20)]
    results = check_cases([AttentionCase(plan, 8, 8, 8, seed=i) for i, plan in enumerate(plans)])
    for result in results:
        assert result.max_in_flight <= 1
        for one in range(8):
            for other in range(one):
                shared = [
                    [
                        record.ranks
                        for record in result.records[rank]
                        if {one, other} <= set(record.ranks)
                    ]
                    for rank in (one, other)
                ]
                assert shared[0] == shared[1]


class EchoKernel:
    """Gives the queries back, and their gradient: what is left is the exchange alone."""

    name = "echo"

    def forward(self, q, k, v, call):
        return q.clone(), q.new_zeros(q.shape[1], q.shape[0])

    def backward(self, dout, state, call):
        return dout.clone(), torch.ones_like(state.k_CKD), torch.ones_like(state.v_CKV)


def test_c5_to_heads_and_back_is_the_identity_bit_for_bit() -> None:
    assert all(run_ranks(8, _echo))


def _echo(rank: int) -> bool:
    groups = NestedGroups.create(TREE, [range(8)])
    runtime = local_runtime(groups, EchoKernel())
    rng, is_same = random.Random(11), True
    for seed in range(200):
        plan = random_plan(rng, TREE, random_lengths(rng, 8, 60))
        batch = NestedBatch.build(plan, rank)
        torch.manual_seed(1000 * seed + rank)
        rows, num_tokens = batch.layout.buffer_tokens, batch.layout.num_tokens
        q, dout = torch.randn(rows, 8, 4, requires_grad=True), torch.randn(rows, 8, 4)
        k = torch.randn(rows, 2, 4, requires_grad=True)
        out = nested_attention(q, k, k.detach(), batch, AttentionMask(1.0), runtime)
        out.backward(dout)
        is_same &= torch.equal(out[:num_tokens], q[:num_tokens])
        is_same &= torch.equal(q.grad[:num_tokens], dout[:num_tokens])
        # Every rank that got a copy of a key head sent one back: d / K of them at degree d > K.
        copies = [torch.full((p.num_tokens,), max(1, p.degree // 2)) for p in batch.layout.slices]
        expected = torch.cat([*copies, torch.zeros(rows - num_tokens)]).float()
        is_same &= torch.equal(k.grad, expected[:, None, None].expand_as(k.grad))
    return is_same


def test_l2_the_autograd_function_passes_gradcheck() -> None:
    assert run_ranks(1, _gradcheck) == [True]


def _gradcheck(rank: int) -> bool:
    tree = SPTree(1, (1,))
    runtime = local_runtime(NestedGroups.create(tree, [[0]]))
    batch = NestedBatch.build(forced(tree, [(5, 1, 0), (1, 1, 0), (3, 1, 0)]), 0, row_multiple=4)
    qkv = [
        torch.randn(12, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        return nested_attention(*leaves, batch, AttentionMask(0.5), runtime)

    return torch.autograd.gradcheck(attend, qkv)


def test_f4_only_short_samples_stay_at_leaves_and_send_nothing() -> None:
    rng = random.Random(5)
    lengths = [rng.randint(1, 64) for _ in range(400)]
    shape = ModelShape.from_hidden(2, 64, 8, 8, 8)
    plan = plan_batch(lengths, TREE, CostModel(load_profile("h100-ib"), shape, TREE)).plan
    assert {TREE.degree(node) for node in plan.active_nodes()} == {1}
    result = check_cases([AttentionCase(plan, 8, 8, 8)])[0]
    assert result.is_right(1e-10) and result.sent_bytes == [0] * 8


def test_h1_a_recomputed_node_adds_one_prologue_and_one_epilogue() -> None:
    counts = run_ranks(4, _count_with_recompute)
    assert counts == [(4 * 2, 4 * 2 + 2 * 2)] * 4  # nodes 4:0 and one of 2:*; 6 instead of 4 each


def _count_with_recompute(rank: int) -> tuple[int, int]:
    tree, log = SPTree(4, (1, 2, 4)), CollectiveLog()
    groups = NestedGroups.create(tree, [range(4)], logged_new_group(log))
    runtime = local_runtime(groups)
    plan = forced(tree, [(30, 4, 0), (20, 2, 0), (20, 2, 1), (9, 1, 0)])
    batch, mask = NestedBatch.build(plan, rank), AttentionMask(0.3)
    counts = []
    for recompute in (False, True):
        q, k, v = (
            torch.randn(batch.layout.buffer_tokens, 4, 8, requires_grad=True) for _ in range(3)
        )

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return nested_attention(*qkv, batch, mask, runtime)

        log.clear()
        if recompute:
            out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=True)
        else:
            out = attend(q, k, v)
        out.sum().backward()
        counts.append(len(log.records))
    return counts[0], counts[1]


def test_d3_a_sample_does_not_see_its_neighbour() -> None:
    for samples in (
        [(300, 4, 0), (724, 4, 0)],
        [(300, 2, 0), (724, 2, 0)],
        [(300, 1, 0), (724, 1, 0)],
        [(300, 4, 0), (724, 2, 1)],
        [(300, 1, 2), (724, 4, 0)],
    ):
        for kept in run_ranks(4, _second_sample_with_changed_first, samples):
            assert kept[0] and kept[1]


def _second_sample_with_changed_first(
    rank: int, samples: list[tuple[int, int, int]]
) -> tuple[bool, bool]:
    """Whether the second sample's output stays, and whether the first one's change was seen."""
    tree = SPTree(4, (1, 2, 4))
    runtime = local_runtime(NestedGroups.create(tree, [range(4)]))
    plan = forced(tree, samples)
    batch = NestedBatch.build(plan, rank)
    numbers = batch.layout.token_numbers(plan.lengths)
    torch.manual_seed(0)
    qkv = [torch.randn(int(plan.lengths.sum()), 4, 8) for _ in range(3)]
    outputs = []
    for last_token in (1.0, -3.0):
        for tensor in qkv:
            tensor[samples[0][0] - 1] = last_token
        filler = [tensor.new_zeros(batch.layout.num_filler_tokens, 4, 8) for tensor in qkv]
        rows = [
            torch.cat([x[torch.from_numpy(numbers)], f]) for x, f in zip(qkv, filler, strict=True)
        ]
        out = nested_attention(*rows, batch, AttentionMask(0.3), runtime)[: len(numbers)]
        outputs.append(out)
    is_second = torch.from_numpy(numbers >= samples[0][0])
    is_last = torch.from_numpy(numbers == samples[0][0] - 1)
    same = torch.equal(outputs[0][is_second], outputs[1][is_second])
    changed = not is_last.any() or not torch.equal(outputs[0][is_last], outputs[1][is_last])
    return same, bool(changed)


def test_i1_three_groups_a_rank_and_no_more_with_more_plans() -> None:
    for num_groups, num_creations, unchanged in run_ranks(8, _groups_over_many_plans):
        assert (num_groups, num_creations, unchanged) == (3, 4 + 2 + 1, True)


def _groups_over_many_plans(rank: int) -> tuple[int, int, bool]:
    """200 plans over 48 layers' worth of calls; the last node is used by two ranks alone."""
    calls = []

    def counted_new_group(ranks: list[int]) -> torch.distributed.ProcessGroup | None:
        calls.append(tuple(ranks))
        return torch.distributed.new_group(ranks)

    groups = NestedGroups.create(TREE, [range(8)], counted_new_group)
    groups.warm_up(CPU)
    created = len(calls)
    runtime = local_runtime(groups)
    rng = random.Random(3)
    plans = [random_plan(rng, TREE, random_lengths(rng, 4, 20)) for _ in range(200)]
    plans.append(forced(TREE, [(9, 2, 3)]))
    for plan in plans:
        batch = NestedBatch.build(plan, rank)
        q = torch.ones(batch.layout.buffer_tokens, 8, 8)
        nested_attention(q, q, q, batch, AttentionMask(0.3), runtime)
    return groups.num_groups, groups.num_creations, len(calls) == created


def test_warming_up_exchanges_once_in_each_group_of_the_rank_root_first() -> None:
    for rank, records in enumerate(run_ranks(8, _warm_up)):
        path = [TREE.ranks(node) for node in TREE.path(rank) if TREE.degree(node) > 1]
        assert records == [tuple(ranks) for ranks in path]


def _warm_up(rank: int) -> list[tuple[int, ...]]:
    log = CollectiveLog()
    NestedGroups.create(TREE, [range(8)], logged_new_group(log)).warm_up(CPU)
    return [record.ranks for record in log.records]


def test_l4_the_first_message_is_the_failing_ranks_and_names_the_step() -> None:
    with pytest.raises(RankError, match="rank 1 failed") as caught:
        run_ranks(4, _raise_in_prologue)
    assert "out of memory (made up)" in str(caught.value)
    assert "fwd prologue of node 4:0" in str(caught.value)


def _raise_in_prologue(rank: int) -> None:
    tree = SPTree(4, (1, 2, 4))
    runtime = local_runtime(NestedGroups.create(tree, [range(4)]))
    batch = NestedBatch.build(forced(tree, [(16, 4, 0)]), rank)
    if rank == 1:

        def fail(exchange: object) -> None:
            raise RuntimeError("out of memory (made up)")

        runtime.queue.issue = fail  # type: ignore[method-assign]
    q = torch.ones(batch.layout.buffer_tokens, 4, 8)
    nested_attention(q, q, q, batch, AttentionMask(0.3), runtime)


def test_wrong_rows_are_refused() -> None:
    batch = NestedBatch.build(forced(TREE, [(9, 1, 0)]), 0)
    q = torch.ones(8, 4, 8)
    with pytest.raises(ValueError, match="attention got 8 rows, the plan gives rank 0 9"):
        nested_attention(q, q, q, batch, AttentionMask(1.0), None)  # type: ignore[arg-type]
