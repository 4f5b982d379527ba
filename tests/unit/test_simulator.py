"""Pure tests of the simulator: against an event loop over every rank's own list of steps."""

import dataclasses
import itertools
import json
import random
from collections import deque

import numpy as np
import pytest

from megatron_nsp.cli import main
from megatron_nsp.order import ALL_ROOT_FIRST, NodeOrders, in_order
from megatron_nsp.plan import Plan
from megatron_nsp.planner import CostModel, known_model, load_profile, plan_batch
from megatron_nsp.planner.lengths import draw_batch, load_table
from megatron_nsp.planner.profile import AttentionRate
from megatron_nsp.planner.saving import aware_of_saving, kept_output
from megatron_nsp.recompute import mark_saved
from megatron_nsp.schedule import Pass, Phase, Step, build_schedule, communicates
from megatron_nsp.simulator import IterationSettings, simulate_plan
from megatron_nsp.simulator.ablation import attention_only
from megatron_nsp.simulator.network import active_paths
from megatron_nsp.simulator.order_search import choose_orders, layers_end_us, orders_of_trees
from megatron_nsp.simulator.sharding import sharding_us
from megatron_nsp.split import Split
from megatron_nsp.testing.random_plans import (
    random_native_nodes,
    random_orders,
    random_plan,
    random_splits,
)
from megatron_nsp.tree import Node, SPTree
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


def event_loop_us(plan: Plan, cost: CostModel, settings: IterationSettings) -> float:
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
    recompute = rng.choice(("none", "attention", "full"))
    cost = dataclasses.replace(cost, shape=shape, recompute=recompute)
    lengths = [int(30_000 ** rng.random()) for _ in range(rng.randint(1, 14))]
    plan = random_plan(rng, cost.tree, lengths)
    if seed % 3 == 0:
        plan = plan_batch(lengths, cost.tree, cost, num_micro_batches=2).plan
    elif seed % 3 == 1:
        plan = random_splits(rng, plan, shape.num_heads, shape.num_kv_heads)
        if seed % 2:
            plan = random_native_nodes(rng, plan)
    settings = IterationSettings(
        overlap=bool(rng.getrandbits(1)),
        saved=mark_saved(plan, kept_output(shape), rng.choice((0.0, 1e6, 1e12))),
        gather_us=rng.choice((0.0, 300.0)),
        scatter_us=rng.choice((0.0, 500.0)),
    )
    found = simulate_plan(plan, cost, settings)
    assert found.step_us == pytest.approx(event_loop_us(plan, cost, settings), rel=1e-12)


def test_the_parts_of_a_step_add_up_on_every_rank() -> None:
    cost = dataclasses.replace(cluster(16, 8), recompute="full")
    plan = random_plan(random.Random(2), cost.tree, [9000, 30, 4000, 12000, 700, 5000])
    settings = IterationSettings(gather_us=200.0, scatter_us=300.0)
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
    serial = simulate_plan(plan, cost, IterationSettings(overlap=False))
    streamed = simulate_plan(plan, cost, IterationSettings(overlap=True))
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
        found = simulate_plan(plan, how, IterationSettings(overlap=overlap))
        assert found.step_us == pytest.approx(how.score(plan).load_us, rel=1e-9)


def test_saving_more_recomputes_less() -> None:
    cost = dataclasses.replace(cluster(16, 8), recompute="attention")
    plan = random_plan(random.Random(4), cost.tree, [9000, 30, 4000, 12000, 700, 5000, 60])
    output, before = kept_output(cost.shape), float("inf")
    for tokens in (0.0, 3000.0, 6000.0, float("inf")):
        saved = mark_saved(plan, output, tokens * output.bytes_per_token)
        settings = IterationSettings(saved=saved)
        redone = float(simulate_plan(plan, cost, settings).recompute_us.sum())
        assert redone < before
        before = redone
    assert before == 0.0


def test_ranks_that_hold_nothing_do_not_hold_others_up() -> None:
    tree = SPTree(4, (1, 2, 4))
    cost = dataclasses.replace(workstation(4, (1, 2, 4)), tree=tree)
    plan = Plan.from_nodes(tree, [500], [tree.node(2, 1)])
    found = simulate_plan(plan, cost)
    assert found.attention_us[:2].tolist() == [0.0, 0.0] and found.idle_us[0] == found.step_us - (
        cost.profile.bias_us
    )
    assert simulate_plan(Plan.from_nodes(tree, [], []), cost).step_us == cost.profile.bias_us


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_steps_in_one_order_are_every_rank_s_own_schedule(seed: int) -> None:
    rng = random.Random(seed)
    tree = SPTree(8, rng.choice(((1, 2, 4, 8), (1, 2, 4))))
    plan = random_splits(rng, random_plan(rng, tree, [50, 60, 70, 80, 90, 4, 5, 6]), 8, 2)
    plan = random_native_nodes(rng, plan) if seed % 2 else plan
    orders, nodes = random_orders(rng, plan), list(tree.nodes())
    cost = dataclasses.replace(cluster(8, 8), tree=tree)
    for pass_, overlap in itertools.product(Pass, (True, False)):
        paths = active_paths(plan, 0, cost, orders_of_trees(orders, plan, 0, pass_))
        steps = paths.order(pass_, overlap)
        for rank in range(8):
            active = in_order(plan.active_path(rank, 0), orders.of_rank(0, tree, rank)[pass_])
            splits = {node: plan.split_of(node, 0) for node in active}
            own = build_schedule(active, pass_, overlap, splits)
            kept = [
                step._replace(node=nodes[paths.node[step.node.depth, rank]])
                for step, on in steps
                if on[rank]
            ]
            assert kept == list(own)


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_order_never_ends_later_than_root_first(seed: int) -> None:
    rng = random.Random(seed)
    cost = workstation(12, (1, 3, 6, 12)) if seed % 2 else cluster(16, 8)
    cost = dataclasses.replace(
        cost, profile=dataclasses.replace(cost.profile, inter_bytes_per_s=2e9)
    )
    lengths = [int(30_000 ** rng.random()) for _ in range(20)]
    plan = random_plan(rng, cost.tree, lengths)
    orders = choose_orders(plan, cost)
    assert choose_orders(plan, cost) == orders
    for pass_ in Pass:
        first, chosen = (
            layers_end_us(active_paths(plan, 0, cost, listed), pass_, cost)
            for listed in ((), orders_of_trees(orders, plan, 0, pass_))
        )
        by_tree = (cost.tree.num_ranks // cost.tree.max_degree, -1)
        first_us, chosen_us = (x.reshape(by_tree).max(axis=1) for x in (first, chosen))
        assert (chosen_us <= first_us).all()
        changed = [(0, pass_, index) in orders.order_of for index in range(by_tree[0])]
        assert (chosen_us < first_us).tolist() == changed


def test_the_larger_exchange_of_the_root_is_hidden_under_the_leaf() -> None:
    cost = workstation(4, (1, 2, 4))
    slow = dataclasses.replace(cost.profile, intra_bytes_per_s=2e7, exchanges={})
    cost = dataclasses.replace(cost, profile=slow)
    nodes = [cost.tree.node(4, 0)] + [cost.tree.node(1, rank) for rank in range(4)]
    plan = Plan.from_nodes(cost.tree, [400, 900, 900, 900, 900], nodes)
    # q, k, v go out in forward, dq, dk, dv come back in backward: leaf first, then leaf last.
    assert choose_orders(plan, cost).order_of == {(0, Pass.FWD, 0): (2, 0)}


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
    with pytest.raises(ValueError, match="recompute must be one of none, attention, full, got all"):
        dataclasses.replace(cluster(4, 4), recompute="all")


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "simulate --lengths paper-mix --ranks 16 --model qwen3-30b-a3b --ep 8 --batches 2 --json"
    )
    words += " --batches 2 --batch-tokens 300K --max-len 64K --profile h200-ib --memory-gb 100"
    words += " --offload-optimizer --save-gb 4 --policies two-level,auto --ablation"
    words += " --recompute full"
    assert main(words.split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == run_json(words, capsys)
    rows, reference = data["policies"], data["reference"]
    assert {"auto", "two-level", reference} <= set(rows) and len(data["batches"]) == 2
    assert rows[reference]["speedup"] == [1.0, 1.0]
    for row in rows.values():
        ratio = np.array(rows[reference]["step_us"]) / np.array(row["step_us"])
        np.testing.assert_allclose(row["speedup"], ratio)
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    missing = {name: sum(step_us) for name, step_us in data["ablation"].items()}
    assert list(missing) == ["full", "recompute", "overlap", "router", "cost model"]
    assert missing["full"] == sum(rows["auto"]["step_us"]) == min(missing.values())
    assert missing["recompute"] > missing["full"] < missing["cost model"]
    assert data["not_ablated"] == {}
    best = min(row["step_us"] for name, row in rows.items() if name.startswith("static"))
    assert sum(best) >= sum(rows[reference]["step_us"])
    assert all("does not fit the token budget" in why for why in data["failed"].values())
    assert main(words.replace("--json ", "").split()) == 0
    text = capsys.readouterr().out
    assert "predictions, not measurements" in text and f"speed-up over {reference}" in text


def test_fitted_times_have_no_cost_model_to_take_away(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --lengths wikipedia --ranks 8 --batches 1 --batch-tokens 60K --max-len 16K"
    words += " --profile flexsp-gpt-7b-a100 --policies two-level --ablation"
    why = "profile flexsp-gpt-7b-a100 holds one model's fitted times, not their parts"
    data = run_json(f"{words} --json", capsys)
    assert list(data["ablation"]) == ["full", "recompute", "overlap", "router"]
    assert data["not_ablated"] == {"cost model": why}
    assert main(words.split()) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("cost model")]
    assert line.split(maxsplit=2)[2] == f"cannot be taken away: {why}"
    fitted = CostModel(load_profile("flexsp-gpt-7b-a100"), SMALL, SPTree(2, (1, 2)))
    with pytest.raises(ValueError, match="the cost model cannot be taken away: profile flexsp"):
        attention_only(fitted)


def run_json(words: str, capsys: pytest.CaptureFixture[str]) -> dict:
    """What the command prints as JSON."""
    assert main(words.split()) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batches 0", "--batches must be 1 to 1048576, got 0"),
        ("--micro-batches 0", "--micro-batches must be 1 to 1048576, got 0"),
        ("--save-gb nan", "--save-gb must be 0 to 1048576, got nan"),
        ("--policies auto,best", "--policies: no policy best, only cheap, all, auto, search"),
        ("--token-budget 100 --max-len 1000", "no static degree can plan every batch: static-1"),
        ("--max-len x", "argument --max-len: takes tokens such as 4096, 192K or 2M, got x"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    try:
        status = main(["simulate", "--lengths", "900,50", "--ranks", "4", *words.split()])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2 and message in printed.err and "Traceback" not in printed.err


def test_planning_for_saved_outputs_takes_the_longest_that_ranks_have_room_for() -> None:
    cost = dataclasses.replace(cluster(4, 4), recompute="attention", save_tokens=3000)
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
    output = kept_output(cost.shape)
    for known in (cost, aware_of_saving(cost, 12e9, output)):
        total = 0.0
        for seed in range(3):
            lengths = draw_batch(load_table("wikipedia"), 500_000, 100_000, seed).lengths
            plan = plan_batch(lengths, tree, known, policy="search").plan
            saved = mark_saved(plan, output, 12e9)
            total += simulate_plan(plan, cost, IterationSettings(saved=saved)).step_us
        steps.append(total)
    assert steps[1] < 0.995 * steps[0]


def test_without_batch_tokens_a_table_gives_32k_a_rank_and_a_short_list_one_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "simulate --ranks 4 --batches 2 --max-len 16K --policies two-level --json --lengths"
    data = run_json(f"{words} wikipedia", capsys)
    assert all(131_072 <= batch["tokens"] < 150_000 for batch in data["batches"])
    assert data["batches"][0] != data["batches"][1]
    data = run_json(f"{words} 900,50,70", capsys)
    assert data["batches"] == [{"samples": 3, "tokens": 1020}] * 2


def test_backends_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --ranks 8 --batches 1 --policies search --json --heads 5 --kv-heads 5"
    words += " --lengths 300000,9 --profile h200-ib --backend"
    steps = {
        backend: run_json(f"{words} {backend}", capsys)["policies"]["search"]["step_us"][0]
        for backend in ("ulysses", "ring", "usp", "gather", "auto")
    }
    assert steps["auto"] <= min(steps.values()) * 1.001  # a prediction, made before simulating
    assert 4 * steps["ring"] < steps["ulysses"] and steps["usp"] == steps["ring"]
