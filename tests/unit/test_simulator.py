"""Pure tests of the simulator: against an event loop over every rank's own list of steps."""

import dataclasses
import random
from collections import deque

import numpy as np
import pytest

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import AttentionRate, load_profile
from megatron_nsp.plan.order import ALL_ROOT_FIRST, NodeOrders, in_order
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import mark_saved
from megatron_nsp.plan.schedule import Step, build_schedule, communicates
from megatron_nsp.plan.split import Split
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.planner import plan_batch
from megatron_nsp.simulator import StepSettings, simulate_plan
from megatron_nsp.simulator.order_search import choose_orders
from megatron_nsp.simulator.sharding import sharding_us
from megatron_nsp.steps.lengths import draw_batch, load_table
from megatron_nsp.testing.random_plans import (
    random_native_nodes,
    random_plan,
    random_splits,
)
from tests.unit.planner_cases import SMALL, cluster, workstation


def step_us(plan: Plan, m: int, cost: CostModel, step: Step) -> float:
    """Time of one step of one node in one layer, written from the cost model's parts."""
    how = cost.of(plan.tree.degree(step.node), plan.split_of(step.node, m))
    lengths = plan.lengths[plan.samples_of(step.node, m)]
    if step.phase is Phase.NATIVE:
        round_us, tokens = how.round_us(lengths, step.pass_).sum(), float(lengths.sum())
        work_us = float(how.attention_us(step.pass_, np.array(round_us), np.array(tokens)))
        return (work_us + how.latency_us) / cost.shape.num_layers
    if step.phase is Phase.COMPUTE:
        work_us = float(how.round_us(lengths, step.pass_).sum()) * how.has_call(step.round)
    else:
        per_token_us = how.exchange_us_per_token(step.pass_, step.phase, step.round)
        work_us = float(lengths.sum()) * per_token_us
    return work_us / cost.shape.num_layers + how.phase_latency_us(step.phase, step.round)


def run_pass(
    plan: Plan,
    m: int,
    cost: CostModel,
    pass_: Pass,
    clocks: list[list[float]],
    overlap: bool,
    orders: NodeOrders = ALL_ROOT_FIRST,
) -> None:
    """One pass of one layer; `clocks[rank]` is when compute and communication are free.

    Every rank goes down its own list of steps. A step that communicates waits until all ranks of
    its node have come to it.
    """
    num_ranks = plan.tree.num_ranks
    splits = {node: plan.split_of(node, m) for node in plan.active_nodes(m)}
    lists = [
        deque(
            build_schedule(
                in_order(plan.active_path(rank, m), orders.of_rank(m, plan.tree, rank)[pass_]),
                pass_,
                overlap,
                splits,
            )
        )
        for rank in range(num_ranks)
    ]
    received: dict[tuple[int, Node, int], float] = {}
    returned: dict[tuple[int, Node], float] = {}
    sent: list[list[float]] = [[] for _ in range(num_ranks)]

    def run(members: list[int], step: Step) -> None:
        took = step_us(plan, m, cost, step)
        if step.phase is Phase.COMPUTE:
            (rank,) = members
            there = received[rank, step.node, step.round]
            clocks[rank][0] = max(clocks[rank][0], there) + took
            return
        if step.phase is Phase.NATIVE:  # nothing of anybody's is on its way
            end = max(max([*clocks[rank], *sent[rank]]) for rank in members) + took
            for rank in members:
                clocks[rank] = [end, end]
            return
        if step.phase is Phase.EPILOGUE:
            for rank in members:
                clocks[rank][0] = max(clocks[rank][0], returned.get((rank, step.node), 0.0))
        elif step.phase is Phase.PROLOGUE and step.round:  # passes on what the last one brought
            for rank in members:
                there = received[rank, step.node, step.round - 1]
                clocks[rank][0] = max(clocks[rank][0], there)
        if not communicates(step, plan.tree.degree(step.node), splits[step.node]):
            ends = {rank: clocks[rank][0] for rank in members}
        else:
            end = max(max(clocks[rank]) for rank in members) + took
            ends = dict.fromkeys(members, end)
            for rank in members:
                clocks[rank][1] = end
        for rank, end in ends.items():
            if step.phase is Phase.EPILOGUE:
                sent[rank].append(end)
            elif step.phase is Phase.PROLOGUE:
                received[rank, step.node, step.round] = end
            else:
                returned[rank, step.node] = end
            if not overlap:
                clocks[rank][0] = max(clocks[rank][0], end)

    while any(lists):
        moved = False
        for rank in range(num_ranks):
            if not lists[rank]:
                continue
            step, members = lists[rank][0], [rank]
            if communicates(step, plan.tree.degree(step.node), splits[step.node]):
                members = list(plan.tree.ranks(step.node))
            if all(lists[member] and lists[member][0] == step for member in members):
                run(members, step)
                for member in members:
                    lists[member].popleft()
                moved = True
        assert moved, "the lists of steps lock each other up"
    for rank, ends in enumerate(sent):
        clocks[rank][0] = max([clocks[rank][0], *ends])


def event_loop_us(plan: Plan, cost: CostModel, settings: StepSettings) -> float:
    """The step, with plain numbers and loops."""
    num_ranks, layers = plan.tree.num_ranks, cost.shape.num_layers
    clocks = [[0.0, 0.0] for _ in range(num_ranks)]
    sharding_free = 0.0
    group = cost.shape.expert_degree

    def dense(m: int, pass_: Pass) -> None:
        tokens = plan.token_load(m)
        expert_us = cost.expert_us_per_token(pass_) / layers
        own_us = cost.dense_us_per_token(pass_) / layers - expert_us
        for rank in range(num_ranks):
            clocks[rank][0] += own_us * tokens[rank]
        for first in range(0, num_ranks, group):
            block = range(first, first + group)
            if group > 1 and expert_us:
                latest = max(clocks[rank][0] for rank in block)
                for rank in block:
                    clocks[rank][0] = latest
            for rank in block:
                clocks[rank][0] += expert_us * sum(tokens[r] for r in block) / group

    def shard(took: float) -> float:
        nonlocal sharding_free
        if took:
            sharding_free = max(sharding_free, *(clock[0] for clock in clocks)) + took
        return sharding_free

    orders = choose_orders(plan, cost) if settings.overlap else ALL_ROOT_FIRST
    for m in range(plan.num_micro_batches):
        redone = settings.saved.recomputed(plan)
        for pass_ in Pass:
            gathered = shard(settings.gather_us)
            for layer in range(layers):
                for clock in clocks:
                    clock[0] = max(clock[0], gathered)
                if layer + 1 < layers:
                    gathered = shard(settings.gather_us)
                how = {"overlap": settings.overlap, "orders": orders}
                if pass_ is Pass.FWD:
                    run_pass(plan, m, cost, pass_, clocks, **how)
                    dense(m, pass_)
                    continue
                if cost.recompute != "none":
                    run_pass(redone, m, cost, Pass.FWD, clocks, **how)
                if cost.recompute == "full":
                    dense(m, Pass.FWD)
                dense(m, pass_)
                run_pass(plan, m, cost, pass_, clocks, **how)
                shard(settings.scatter_us)
        for clock in clocks:
            clock[0] = max(clock[0] + cost.profile.bias_us, sharding_free)
    return max(clock[0] for clock in clocks)


@pytest.mark.parametrize("seed", range(60))
def test_the_simulation_equals_an_event_loop_over_all_lists_of_steps(seed: int) -> None:
    rng = random.Random(seed)
    cost = workstation(12, (1, 3, 6, 12)) if seed % 2 else cluster(8, 8)
    shape = dataclasses.replace(
        cost.shape,
        num_layers=rng.choice((1, 3)),
        expert_degree=rng.choice((1, 2, 4)),
        expert_flops_per_token=cost.shape.dense_flops_per_token / 2,
        expert_bytes_per_token=64.0,
    )
    recompute = rng.choice(("none", "selective", "full"))
    cost = dataclasses.replace(cost, shape=shape, recompute=recompute)
    lengths = [int(30_000 ** rng.random()) for _ in range(rng.randint(1, 14))]
    plan = random_plan(rng, cost.tree, lengths)
    if seed % 3 == 0:
        plan = plan_batch(lengths, cost.tree, cost, num_micro_batches=2).plan
    elif seed % 3 == 1:
        plan = random_splits(rng, plan, shape.num_heads, shape.num_kv_heads)
        if seed % 2:
            plan = random_native_nodes(rng, plan)
    settings = StepSettings(
        overlap=bool(rng.getrandbits(1)),
        saved=mark_saved(plan, shape.saved_sizes, rng.choice((0.0, 1e6, 1e12))),
        gather_us=rng.choice((0.0, 300.0)),
        scatter_us=rng.choice((0.0, 500.0)),
    )
    found = simulate_plan(plan, cost, settings)
    assert found.step_us == pytest.approx(event_loop_us(plan, cost, settings), rel=1e-12)


def test_the_parts_of_a_step_add_up_on_every_rank() -> None:
    cost = dataclasses.replace(cluster(16, 8), recompute="full")
    plan = random_plan(random.Random(2), cost.tree, [9000, 30, 4000, 12000, 700, 5000])
    settings = StepSettings(gather_us=200.0, scatter_us=300.0)
    found = simulate_plan(plan, cost, settings)
    parts = ("attention", "dense", "recompute", "exposed", "waited", "sharding", "bias", "idle")
    total = sum(getattr(found, f"{part}_us") for part in parts)
    np.testing.assert_allclose(total, found.step_us, rtol=1e-9)
    assert sum(found.shares().values()) == pytest.approx(1.0)


def test_streaming_is_never_slower_for_one_path_and_hides_communication() -> None:
    tree = SPTree(8, (1, 2, 4, 8))
    cost = dataclasses.replace(cluster(8, 8), tree=tree)
    nodes = [tree.node(8, 0), *(tree.node(1, rank) for rank in range(8))]
    plan = Plan.from_nodes(tree, [64_000] + [8_000] * 8, nodes)
    serial = simulate_plan(plan, cost, StepSettings(overlap=False))
    streamed = simulate_plan(plan, cost, StepSettings(overlap=True))
    assert streamed.step_us < serial.step_us
    assert streamed.exposed_us.sum() < 0.7 * serial.exposed_us.sum()


def test_without_nesting_the_step_is_the_planner_s_prediction() -> None:
    cost = cluster(8, 8)
    for degree, count in ((8, 1), (1, 8)):
        nodes = [cost.tree.node(degree, index) for index in range(count)]
        plan = Plan.from_nodes(cost.tree, [8000] * count, nodes)
        assert simulate_plan(plan, cost).step_us == pytest.approx(cost.score(plan).load_us)


@pytest.mark.parametrize("length", [96, 2016, 30_048, 300_000])
@pytest.mark.parametrize(
    "split",
    [
        *(Split(2), Split(4), Split(16), Split(2, "gather")),
        *(Split(16, "te-p2p"), Split(16, "te-a2a")),
    ],
)
def test_what_rings_hide_is_the_planner_s_prediction(length: int, split: Split) -> None:
    cost = cluster(16, 16)
    node = cost.tree.node(16, 0)
    plan = Plan.from_nodes(cost.tree, [length, length // 3], [node] * 2, splits={(0, node): split})
    for overlap in (True, False):
        how = dataclasses.replace(cost, overlap=overlap)
        found = simulate_plan(plan, how, StepSettings(overlap=overlap))
        assert found.step_us == pytest.approx(how.score(plan).load_us, rel=1e-9)


def test_saving_more_recomputes_less() -> None:
    cost = dataclasses.replace(cluster(16, 8), recompute="selective")
    plan = random_plan(random.Random(4), cost.tree, [9000, 30, 4000, 12000, 700, 5000, 60])
    output, before = cost.shape.saved_sizes, float("inf")
    for tokens in (0.0, 3000.0, 6000.0, float("inf")):
        saved = mark_saved(plan, output, tokens * output.bytes_per_token)
        settings = StepSettings(saved=saved)
        redone = float(simulate_plan(plan, cost, settings).recompute_us.sum())
        assert redone < before
        before = redone
    assert before == 0.0


def test_layers_recomputed_in_part_take_their_share() -> None:
    cost = dataclasses.replace(cluster(16, 8), recompute="full")
    plan = random_plan(random.Random(4), cost.tree, [9000, 30, 4000, 12000, 700, 5000, 60])
    layers = cost.shape.num_layers
    redone_us = [
        simulate_plan(
            plan, dataclasses.replace(cost, recompute_share=number / layers)
        ).recompute_us.sum()
        for number in range(layers + 1)
    ]
    assert redone_us == pytest.approx([n / layers * redone_us[-1] for n in range(layers + 1)])
    assert redone_us[-1] > 0


def test_ranks_that_hold_nothing_do_not_hold_others_up() -> None:
    tree = SPTree(4, (1, 2, 4))
    cost = dataclasses.replace(workstation(4, (1, 2, 4)), tree=tree)
    plan = Plan.from_nodes(tree, [500], [tree.node(2, 1)])
    found = simulate_plan(plan, cost)
    assert found.attention_us[:2].tolist() == [0.0, 0.0] and found.idle_us[0] == found.step_us - (
        cost.profile.bias_us
    )
    assert simulate_plan(Plan.from_nodes(tree, [], []), cost).step_us == cost.profile.bias_us


def test_gathering_parameters_takes_what_the_slower_link_allows() -> None:
    model, profile = known_model("qwen3-30b-a3b"), load_profile("h200-ib")
    shared = model.shared_parameters / 48
    experts = model.expert_parameters / 48 / 8
    gather_us, scatter_us = sharding_us(model, profile, 64, expert_parallel=8)
    own_port = experts * 7 / 8 / 45e9
    all_ports = shared * max(56 / 64 / (8 * 45e9), 63 / 64 / 350e9)
    assert gather_us == pytest.approx(2e6 * (own_port + all_ports))
    assert scatter_us == 2 * gather_us
    assert sharding_us(model, profile, 8)[0] == pytest.approx(
        2e6 * model.num_parameters / 48 * 7 / 8 / 350e9
    )


def test_attention_is_timed_by_its_length() -> None:
    rates = {1: AttentionRate(1e9, 1e9), 1000: AttentionRate(4e9, 4e9)}
    profile = dataclasses.replace(load_profile("cpu-gloo"), attention=rates)
    cost = CostModel(profile, SMALL, SPTree(1, (1,)))
    short, long = (
        float(simulate_plan(Plan.from_nodes(cost.tree, [n], [Node(0, 0)]), cost).attention_us[0])
        for n in (1, 1000)
    )
    launches = 2 * SMALL.num_layers * profile.latency_us
    assert (long - launches) / (short - launches) == pytest.approx(1e6 / 4)


def test_unknown_recomputation_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute must be one of none, selective, full, got all"):
        dataclasses.replace(cluster(4, 4), recompute="all")


def test_planning_for_saved_outputs_takes_the_longest_that_ranks_have_room_for() -> None:
    cost = dataclasses.replace(cluster(4, 4), recompute="selective", save_tokens=3000)
    plain = dataclasses.replace(cost, save_tokens=0)
    lengths = np.array([100, 8000, 3900, 5000])
    spared = plain.sample_times(lengths).bwd_us - cost.sample_times(lengths).bwd_us
    # All ranks have room for 12000 tokens: 8000 go in, with 5000 more they would not; one rank has
    # room for 3000, so degree 4 it must be.
    assert (spared > 0).tolist() == [[False] * 3, [False, False, True], [False] * 3, [False] * 3]
    lengths = np.array([100, 8000, 3900])
    spared = plain.sample_times(lengths).bwd_us - cost.sample_times(lengths).bwd_us
    expected = [[True] * 3, [False, False, True], [False, True, True]]
    assert (spared > 0).tolist() == expected
    assert np.array_equal(plain.sample_times(lengths).fwd_us, cost.sample_times(lengths).fwd_us)


def test_a_plan_that_knows_what_is_saved_is_faster() -> None:
    model = known_model("qwen3-235b-a22b")
    tree = SPTree.powers_of_two(16, 16)
    cost = CostModel(load_profile("h200-ib"), model.shape(), tree, recompute="full")
    steps = []
    output = cost.shape.saved_sizes
    for known in (cost, cost.with_saving(12e9, output)):
        total = 0.0
        for seed in range(3):
            lengths = draw_batch(load_table("wikipedia"), 500_000, 100_000, seed).lengths
            plan = plan_batch(lengths, tree, known, policy="search").plan
            saved = mark_saved(plan, output, 12e9)
            total += simulate_plan(plan, cost, StepSettings(saved=saved)).step_us
        steps.append(total)
    assert steps[1] < 0.995 * steps[0]
