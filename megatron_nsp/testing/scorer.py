"""An independent scorer: the time of a plan from its JSON, written from the formulas alone.

Reads nothing but `plan.nodes`, `profile` and the plan's sizes, and imports nothing of the package,
so that a mistake in the cost model cannot hide in its own test. Plain Python floats and loops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
"""A plan or a profile as `megatron-nsp plan --json` prints it."""


@dataclass(frozen=True)
class Score:
    """`load_us` and `load_no_latency_us` of the step, and `rank_load_us` of each rank."""

    load_us: float
    load_no_latency_us: float
    rank_load_us: list[float]


def exchange_rate(profile: Json, degree: int) -> tuple[float, float]:
    """Bytes a second and latency: the table first, then 'inside a host', then 'across hosts'."""
    table = profile["exchanges"].get("ulysses", {})
    if str(degree) in table:
        return table[str(degree)]["bytes_per_s"], table[str(degree)]["latency_us"]
    together = max(profile["ranks_per_host"] // profile["model"]["stride"], 1)
    if degree <= together and together % degree == 0:
        return profile["intra_bytes_per_s"], profile["latency_us"]
    beside = together if degree % together == 0 else 1
    # Of the parts for the degree - 1 others, those for the degree - beside elsewhere are slow.
    return profile["inter_bytes_per_s"] * (degree - 1) / (degree - beside), profile["latency_us"]


def attention_rate(profile: Json, length: int, which: str) -> float:
    """The kernel's flops a second at a length, on straight lines between the table's lengths."""
    table = sorted((int(known), rate[which]) for known, rate in profile["attention"].items())
    before = [point for point in table if point[0] <= length]
    after = [point for point in table if point[0] > length]
    if not before or not after:
        return (before or after)[-1 if before else 0][1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 + (y1 - y0) * (length - x0) / (x1 - x0)


def fitted_us(length: int, degree: int, profile: Json) -> tuple[float, float]:
    """The same as `sample_us` from one model's fitted times."""
    fitted = profile["fitted"]
    total_us = (fitted["quadratic_us"] * length**2 + fitted["linear_us"] * length) / degree
    if degree > 1:
        sent_bytes = fitted["exchange_bytes_per_token"] * length / degree
        total_us += sent_bytes / exchange_rate(profile, degree)[0] * 1e6
    return total_us * fitted["fwd_share"], total_us * (1 - fitted["fwd_share"])


def sample_us(length: int, degree: int, profile: Json) -> tuple[float, float]:
    """Forward and backward time that one sample adds to each rank of its node."""
    if profile["fitted"] is not None:
        return fitted_us(length, degree, profile)
    model = profile["model"]
    q_heads, kv_heads = model["num_heads"], model["num_kv_heads"]
    attention = 2 * length**2 * q_heads * model["head_dim"] / degree
    fwd_us = attention / attention_rate(profile, length, "fwd_flops_per_s") * 1e6
    bwd_us = attention / attention_rate(profile, length, "bwd_flops_per_s") * 1e6
    dense_us = model["dense_flops_per_token"] * length / degree / profile["dense_flops_per_s"] * 1e6
    exchange_us = 0.0
    if degree > 1:
        qkv_heads = q_heads // degree + 2 * max(kv_heads // degree, 1)
        own_tokens = length / degree
        there = own_tokens * (degree - 1) * qkv_heads
        back = (length - own_tokens) * (q_heads // degree)
        sent_bytes = (there + back) * model["head_dim"] * model["bytes_per_element"]
        exchange_us = sent_bytes / exchange_rate(profile, degree)[0] * 1e6
    attention_exchange_us = exchange_us
    if model["expert_degree"] > 1:
        exchange_us += expert_exchange_us(length, profile) / degree
    layers = model["num_layers"]
    output = model["output_flops_per_token"] * length / degree
    output_us = output / profile["dense_flops_per_s"] * 1e6
    again_us = {
        "none": 0.0,
        "selective": layers * (fwd_us + attention_exchange_us),
        "full": layers * (fwd_us + exchange_us + dense_us) + output_us,
    }[profile["recompute"]] * profile["recompute_share"]
    # Ranks that share experts wait for one another after what is run again, as in forward.
    with_fwd = model["expert_degree"] > 1
    return (
        layers * (fwd_us + exchange_us + dense_us) + output_us + again_us * with_fwd,
        layers * (2.5 * bwd_us + exchange_us + 2 * dense_us)
        + 2 * output_us
        + again_us * (not with_fwd),
    )


def expert_exchange_us(length: int, profile: Json) -> float:
    """Time one layer takes to send a sample's tokens to their experts and back."""
    model = profile["model"]
    rate = exchange_rate({**profile, "exchanges": {}}, model["expert_degree"])[0]
    return model["expert_bytes_per_token"] * length / rate * 1e6


def expert_us(length: int, profile: Json) -> tuple[float, float]:
    """Work of a sample's experts in both passes, done by one rank."""
    model = profile["model"]
    work_us = model["expert_flops_per_token"] * length / profile["dense_flops_per_s"] * 1e6
    sent_us = expert_exchange_us(length, profile)
    fwd_us = model["num_layers"] * (work_us + sent_us)
    times = 1 + profile["recompute_share"] * (profile["recompute"] == "full")
    return times * fwd_us, model["num_layers"] * (2 * work_us + sent_us)


def ring_node_us(node: Json, profile: Json) -> tuple[float, float, float]:
    """Forward and backward time of a node with ring members, and its latency in a pass.

    Walks the rounds of one layer: what a transfer takes longer than the compute beside it counts.
    Nothing is recomputed and there are no experts.
    """
    assert profile["recompute"] == "none" and profile["model"]["expert_degree"] == 1
    model, degree, members = profile["model"], node["degree"], node["ring_degree"]
    inside, layers, tokens = degree // members, model["num_layers"], sum(node["lengths"])
    width = model["head_dim"] * model["bytes_per_element"]
    q_heads, kv_heads = model["num_heads"] // inside, max(model["num_kv_heads"] // inside, 1)
    is_ring = node["outer"] == "ring"
    calls = members if is_ring else 1

    inside_us = inside_latency_us = 0.0
    if inside > 1:
        rate, inside_latency_us = exchange_rate(profile, inside)
        sent = tokens / degree * (inside - 1) * (2 * q_heads + 2 * kv_heads) * width
        inside_us = sent / rate * 1e6
    rate, latency_us = members_rate(profile, degree, members, node["outer"])
    times = 1 if is_ring else members - 1
    transfer_us = latency_us + times * tokens / members * 2 * kv_heads * width / rate * 1e6

    merge_us = 0.0
    if profile["merged_elements_per_s"]:
        elements = tokens / members * q_heads * model["head_dim"]
        merge_us = elements / profile["merged_elements_per_s"] * 1e6
    totals = []
    for factor, which in ((1.0, "fwd_flops_per_s"), (2.5, "bwd_flops_per_s")):
        round_us = merge_us
        for length in node["lengths"]:
            flops = factor * 2 * length**2 * model["num_heads"] * model["head_dim"] / degree / calls
            round_us += flops / attention_rate(profile, length / calls, which) * 1e6
        beside = [0.0] * (members + 1 if is_ring else 2)
        if is_ring:
            for number in range(1, members):
                beside[number - 1] += transfer_us  # forth, for this round
                if factor > 1:
                    # Back, of this round, under the next; the queue sends it before what follows.
                    beside[number + 1] += transfer_us
            work = [round_us] * members + [0.0]
            busy = [round_us + profile["latency_us"]] * members + [0.0]
        else:
            beside[0] = transfer_us * (2 if factor > 1 else 1)
            work, busy = [0.0, round_us], [0.0, 0.0]
        exposed_us = sum(max(there - over, 0.0) for there, over in zip(beside, busy, strict=True))
        dense_us = model["dense_flops_per_token"] * tokens / degree / profile["dense_flops_per_s"]
        output_us = model["output_flops_per_token"] * tokens / degree / profile["dense_flops_per_s"]
        linear = 1 if factor == 1.0 else 2
        layer_us = sum(work) + inside_us + exposed_us + linear * dense_us * 1e6
        totals.append(layers * layer_us + linear * output_us * 1e6)
    waits_us = calls * profile["latency_us"] + 2 * inside_latency_us
    return totals[0], totals[1], layers * waits_us


def members_rate(profile: Json, degree: int, members: int, outer: str) -> tuple[float, float]:
    """Bytes a second and latency between ring members; here only where nothing was measured."""
    assert not profile["exchanges"]
    rate, latency_us = exchange_rate(profile, degree)
    stride = profile["model"]["stride"]
    together = max(profile["ranks_per_host"] // stride, 1)
    if degree <= together and together % degree == 0:
        return rate, latency_us
    rate = profile["inter_bytes_per_s"]
    if outer == "gather":
        near = max(profile["ranks_per_host"] // (stride * degree // members), 1)
        near = near if members % near == 0 else 1
        rate *= (members - 1) / (members - min(near, members - 1))
    return rate, latency_us


def score_plan(plan: Json, profile: Json) -> Score:
    """Scores the JSON of a plan; a pass waits for its slowest rank, passes add up."""
    num_ranks, num_micro_batches = plan["num_ranks"], plan["num_micro_batches"]
    fwd = [[0.0] * num_ranks for _ in range(num_micro_batches)]
    bwd = [[0.0] * num_ranks for _ in range(num_micro_batches)]
    latency = [[0.0] * num_ranks for _ in range(num_micro_batches)]
    for node in plan["nodes"]:
        degree, m = node["degree"], node["micro_batch"]
        if "ring_degree" in node:
            fwd_us, bwd_us, latency_us = ring_node_us(node, profile)
            for rank in range(node["index"] * degree, (node["index"] + 1) * degree):
                fwd[m][rank] += fwd_us
                bwd[m][rank] += bwd_us
                latency[m][rank] += latency_us
            continue
        times = [sample_us(length, degree, profile) for length in node["lengths"]]
        waits_us = profile["latency_us"]
        if degree > 1:
            waits_us += 2 * exchange_rate(profile, degree)[1]
        for rank in range(node["index"] * degree, (node["index"] + 1) * degree):
            fwd[m][rank] += sum(time[0] for time in times)
            bwd[m][rank] += sum(time[1] for time in times)
            latency[m][rank] += profile["model"]["num_layers"] * waits_us
        group = profile["model"]["expert_degree"]
        if profile["fitted"] is None and degree < group and group % degree == 0:
            # The experts' work is done by the whole group, not by the node's ranks alone.
            shared = [expert_us(length, profile) for length in node["lengths"]]
            first = node["index"] * degree // group * group
            for which, loads in enumerate((fwd, bwd)):
                work_us = sum(each[which] for each in shared)
                for rank in range(node["index"] * degree, (node["index"] + 1) * degree):
                    loads[m][rank] -= work_us / degree
                for rank in range(first, first + group):
                    loads[m][rank] += work_us / group
    load_us, plain_us = 0.0, 0.0
    for m in range(num_micro_batches):
        load_us += max(map(sum, zip(fwd[m], latency[m], strict=True)))
        load_us += max(map(sum, zip(bwd[m], latency[m], strict=True))) + profile["bias_us"]
        plain_us += max(fwd[m]) + max(bwd[m]) + profile["bias_us"]
    ranks = [
        sum(fwd[m][p] + bwd[m][p] + 2 * latency[m][p] for m in range(num_micro_batches))
        for p in range(num_ranks)
    ]
    return Score(load_us, plain_us, ranks)


Option = tuple[int, float, float, float, float]
"""A degree, f and b, and e_f and e_b where a group shares the sample's experts."""


def bound_options(plan: Json, profile: Json, token_budget: int | None) -> list[list[Option]]:
    """The degrees at which each sample fits the token budget."""
    group, choices = profile["model"]["expert_degree"], []
    for length in [length for node in plan["nodes"] for length in node["lengths"]]:
        options = []
        for d in plan["degrees"]:
            if token_budget is None or -(-length // d) <= token_budget:
                fwd_us, bwd_us = sample_us(length, d, profile)
                shared = profile["fitted"] is None and d < group and group % d == 0
                work = expert_us(length, profile) if shared else (0.0, 0.0)
                options.append((d, fwd_us - work[0] / d, bwd_us - work[1] / d, *work))
        choices.append(options)
    return choices


def least_sum_us(
    choices: list[list[Option]], limit_us: float, group: int, cost_us: Callable[..., float]
) -> float:
    """The sum of the least costs among degrees at which a rank has time for its sample."""
    return sum(
        min(
            (
                cost_us(*option)
                for option in options
                if option[1] + option[2] + (option[3] + option[4]) / group <= limit_us
            ),
            default=float("inf"),
        )
        for options in choices
    )


def least_limit_us(
    needed_us: Callable[[float], float], choices: list[list[Option]], num_ranks: int
) -> float:
    """The least M for which `needed_us(M)`, which falls, is at most P M, by halving."""
    low, high = 0.0, 1.0 + sum(d * (f + b) + ef + eb for ((d, f, b, ef, eb), *_) in choices)
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (low, middle) if needed_us(middle) <= num_ranks * middle else (middle, high)
    return high


def work_bound_us(plan: Json, profile: Json, token_budget: int | None = None) -> float:
    """The lower bound by work, biases included."""
    choices = bound_options(plan, profile, token_budget)
    group = profile["model"]["expert_degree"]

    def needed_us(limit_us: float) -> float:
        return least_sum_us(choices, limit_us, group, lambda d, f, b, ef, eb: d * (f + b) + ef + eb)

    bias_us = plan["num_micro_batches"] * profile["bias_us"]
    return least_limit_us(needed_us, choices, plan["num_ranks"]) + bias_us


def mixture_bound_us(plan: Json, profile: Json, token_budget: int | None = None) -> float:
    """The lower bound by mixture, biases included."""
    group, num_ranks = profile["model"]["expert_degree"], plan["num_ranks"]
    choices = bound_options(plan, profile, token_budget)
    leaves = bound_options({**plan, "degrees": [1]}, profile, None)
    ratios = [b / f for ((_, f, b, _, _),) in leaves]
    k = min(ratios + [eb / ef for ((*_, ef, eb),) in leaves if ef])

    def needed_us(limit_us: float) -> float:
        fwd_us = least_sum_us(choices, limit_us, group, lambda d, f, b, ef, eb: d * f + ef)
        fwd_us /= num_ranks
        for _ in range(8):
            offset_us = min(0.0, fwd_us - (limit_us - fwd_us) / k)

            def kept_us(
                d: int, f: float, b: float, ef: float, eb: float, offset_us: float = offset_us
            ) -> float:
                kept, expert = min(f, b / k), min(ef, eb / k)
                lack = b / k - kept + (eb / k - expert) / group
                return d * kept + expert + d * max(0.0, offset_us + lack)

            fwd_us = max(fwd_us, least_sum_us(choices, limit_us, group, kept_us) / num_ranks)
        return least_sum_us(choices, limit_us, group, lambda *o: kept_us(*o) + o[0] * o[2] + o[4])

    bias_us = plan["num_micro_batches"] * profile["bias_us"]
    return least_limit_us(needed_us, choices, num_ranks) + bias_us
