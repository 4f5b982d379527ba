"""An independent scorer: the time of a plan from its JSON, written from the formulas alone.

Reads nothing but `plan.nodes`, `profile` and the plan's sizes, and imports nothing of the package,
so that a mistake in the cost model cannot hide in its own test. Plain Python floats and loops.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """`load_us` and `load_no_latency_us` of the step, and `rank_load_us` of each rank."""

    load_us: float
    load_no_latency_us: float
    rank_load_us: list[float]


def all_to_all_rate(profile: dict, degree: int) -> float:
    """Bytes a second: the table first, then 'inside a host', then 'across hosts'."""
    table = profile["all_to_all_bytes_per_s"]
    if str(degree) in table:
        return table[str(degree)]
    if degree <= profile["ranks_per_host"]:
        return profile["intra_bytes_per_s"]
    return profile["inter_bytes_per_s"] * degree / (degree - profile["ranks_per_host"])


def sample_us(length: int, degree: int, profile: dict) -> tuple[float, float]:
    """Forward and backward time that one sample adds to each rank of its node."""
    model = profile["model"]
    q_heads, kv_heads = model["num_heads"], model["num_kv_heads"]
    attention = 2 * length**2 * q_heads * model["head_dim"] / degree
    attention_us = attention / profile["attention_flops_per_s"] * 1e6
    dense_us = model["dense_flops_per_token"] * length / degree / profile["dense_flops_per_s"] * 1e6
    exchange_us = 0.0
    if degree > 1:
        qkv_heads = q_heads // degree + 2 * max(kv_heads // degree, 1)
        own_tokens = length / degree
        there = own_tokens * (degree - 1) * qkv_heads
        back = (length - own_tokens) * (q_heads // degree)
        sent_bytes = (there + back) * model["head_dim"] * model["bytes_per_element"]
        exchange_us = sent_bytes / all_to_all_rate(profile, degree) * 1e6
    layers = model["num_layers"]
    return (
        layers * (attention_us + exchange_us + dense_us),
        layers * (2.5 * attention_us + exchange_us + 2 * dense_us),
    )


def score_plan(plan: dict, profile: dict) -> Score:
    """Scores the JSON of a plan; a pass waits for its slowest rank, passes add up."""
    num_ranks, num_passes = plan["num_ranks"], plan["num_micro_batches"]
    fwd = [[0.0] * num_ranks for _ in range(num_passes)]
    bwd = [[0.0] * num_ranks for _ in range(num_passes)]
    latency = [[0.0] * num_ranks for _ in range(num_passes)]
    for node in plan["nodes"]:
        degree, m = node["degree"], node["micro_batch"]
        times = [sample_us(length, degree, profile) for length in node["lengths"]]
        phases = 1 if degree == 1 else 3
        for rank in range(node["index"] * degree, (node["index"] + 1) * degree):
            fwd[m][rank] += sum(time[0] for time in times)
            bwd[m][rank] += sum(time[1] for time in times)
            latency[m][rank] += phases * profile["model"]["num_layers"] * profile["latency_us"]
    load_us, plain_us = 0.0, 0.0
    for m in range(num_passes):
        load_us += max(map(sum, zip(fwd[m], latency[m], strict=True)))
        load_us += max(map(sum, zip(bwd[m], latency[m], strict=True))) + profile["bias_us"]
        plain_us += max(fwd[m]) + max(bwd[m]) + profile["bias_us"]
    ranks = [
        sum(fwd[m][p] + bwd[m][p] + 2 * latency[m][p] for m in range(num_passes))
        for p in range(num_ranks)
    ]
    return Score(load_us, plain_us, ranks)


def tightest_bound_us(plan: dict, profile: dict, token_budget: int | None = None) -> float:
    """The least M whose cheapest admissible work fits P * M, by halving, plus the bias."""
    lengths = [length for node in plan["nodes"] for length in node["lengths"]]
    choices = [
        [
            (sum(sample_us(length, degree, profile)), degree)
            for degree in plan["degrees"]
            if token_budget is None or -(-length // degree) <= token_budget
        ]
        for length in lengths
    ]
    low, high = 0.0, sum(min(time for time, _ in options) for options in choices) + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        allowed = [[t * d for t, d in options if t <= middle] for options in choices]
        if all(allowed) and sum(map(min, allowed)) <= plan["num_ranks"] * middle:
            high = middle
        else:
            low = middle
    return high + plan["num_micro_batches"] * profile["bias_us"]
