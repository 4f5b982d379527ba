"""Trees, models and batches that the planner's tests share; and all plans of a tiny tree."""

import itertools

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.models import known_model
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.cost.score import SampleTimes
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.planner import policy_names
from megatron_nsp.steps.lengths import draw_batch, load_table

LARGE = ModelShape.from_hidden(48, 2048, 32, 4, 128)
LARGE_12 = ModelShape.from_hidden(48, 2048, 24, 12, 128)
A3B = known_model("qwen3-30b-a3b")
SMALL = ModelShape.from_hidden(2, 64, 24, 24, 8, bytes_per_element=4)


def cluster(num_ranks: int = 64, max_degree: int = 32) -> CostModel:
    """The usual configuration: powers of two, h100-ib, 48 layers."""
    return CostModel(load_profile("h100-ib"), LARGE, SPTree.powers_of_two(num_ranks, max_degree))


def workstation(num_ranks: int, degrees: tuple[int, ...]) -> CostModel:
    """A small model on CPU ranks."""
    return CostModel(load_profile("cpu-gloo"), SMALL, SPTree(num_ranks, degrees))


def moe(num_ranks: int, expert_degree: int, degrees: tuple[int, ...] = (1, 2, 4, 8)) -> CostModel:
    """A model with shared experts."""
    shape = A3B.shape(expert_parallel=expert_degree)
    return CostModel(load_profile("h200-ib"), shape, SPTree(num_ranks, degrees))


def drawn(name: str, seed: int, tokens: int = 2_000_000, longest: int = 196608) -> np.ndarray:
    """A batch from one of the tables."""
    return draw_batch(load_table(name), tokens, longest, seed).lengths


def ready_policies(tree: SPTree) -> list[str]:
    """Policies that plan any batch at once: not BASP, which refuses most, nor FlexSP's solver."""
    return [name for name in policy_names(tree) if name.split("-")[0] not in ("basp", "flexsp")]


def brute_force_us(times: SampleTimes, token_budget: int | None = None) -> float:
    """The least load of all plans in one micro-batch, without bias, node latency included."""
    tree, num_samples, group = times.tree, len(times.lengths), times.expert_degree
    nodes = [(k, i) for k, d in enumerate(tree.degrees) for i in range(tree.num_ranks // d)]
    covers = np.zeros((len(nodes), tree.num_ranks))
    for row, (k, i) in enumerate(nodes):
        covers[row, i * tree.degrees[k] : (i + 1) * tree.degrees[k]] = 1
    column = np.array([k for k, _ in nodes])
    degrees = np.array(tree.degrees)[column]
    groups = np.arange(tree.num_ranks) // group
    in_group = groups[None, :] == (np.array([i for _, i in nodes]) * degrees // group)[:, None]
    plans = np.array(list(itertools.product(range(len(nodes)), repeat=num_samples)))
    fwd_us = np.zeros((len(plans), tree.num_ranks))
    bwd_us, tokens = np.zeros_like(fwd_us), np.zeros_like(fwd_us)
    for j in range(num_samples):
        node, covered = plans[:, j], covers[plans[:, j]]
        for load_us, own_us, which in ((fwd_us, times.fwd_us, 0), (bwd_us, times.bwd_us, 1)):
            load_us += own_us[j, column][node][:, None] * covered
            if times.expert_us is not None:
                shares = times.shares_experts[column][node][:, None] * times.expert_us[j, which]
                load_us -= shares / degrees[node][:, None] * covered
                load_us += shares / group * in_group[node]
    for row, (k, i) in enumerate(nodes):
        is_active = (plans == row).any(axis=1)
        latency_us = np.where(is_active, times.latency_us[k], 0.0)[:, None] * covers[row]
        fwd_us, bwd_us = fwd_us + latency_us, bwd_us + latency_us
        stream = np.where(plans == row, times.lengths, 0).sum(axis=1)
        degree = tree.degrees[k]
        slices = np.diff(stream[:, None] * np.arange(degree + 1) // degree, axis=1)
        tokens[:, i * degree : (i + 1) * degree] += slices
    load_us = fwd_us.max(axis=1) + bwd_us.max(axis=1)
    if token_budget is not None:
        load_us = load_us[tokens.max(axis=1) <= token_budget]
    return float(load_us.min(initial=np.inf))
