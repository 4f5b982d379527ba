"""Pure tests of known models and the memory estimate: sizes as published, budgets that follow."""

import dataclasses

import pytest

from megatron_nsp.cost.memory import (
    RECOMPUTE,
    MemoryPlan,
    activation_bytes,
    micro_batches_in_flight,
    state_bytes,
    token_budget,
)
from megatron_nsp.cost.models import MODELS, Model, known_model

PUBLISHED_BILLIONS = {
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-8b": 8.19,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "qwen1.5-1.8b": 1.84,
    "qwen2.5-3b": 3.09,
    "gpt-7b": 6.7,
}
A3B, DENSE = known_model("qwen3-30b-a3b"), known_model("qwen3-8b")


@pytest.mark.parametrize("name", MODELS)
def test_known_models_have_the_published_number_of_parameters(name: str) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.01)


def test_the_shape_of_a_dense_model_is_two_flops_a_parameter() -> None:
    shape = DENSE.shape()
    flops = 36 * shape.dense_flops_per_token + shape.output_flops_per_token
    embedding, norms = 151936 * 4096, 36 * 2 * 4096
    assert flops == 2 * (DENSE.num_parameters - embedding - norms)
    assert (shape.expert_bytes_per_token, shape.expert_degree, shape.stride) == (0, 1, 1)


def test_tensor_parallelism_splits_heads_and_work() -> None:
    whole, split = DENSE.shape(), DENSE.shape(tensor_parallel=4)
    assert (split.num_heads, split.num_kv_heads, split.stride) == (8, 2, 4)
    assert split.dense_flops_per_token == whole.dense_flops_per_token / 4
    assert A3B.shape(tensor_parallel=8).num_kv_heads == 1
    assert DENSE.shape(pipeline_parallel=4).num_layers == 9


def test_a_token_goes_to_its_experts_and_back() -> None:
    shape = A3B.shape(expert_parallel=8)
    assert shape.expert_bytes_per_token == 2 * 8 * 2048 * 2 * 7 / 8
    active = A3B.shape().dense_flops_per_token / 2
    assert active == 2 * 2048 * 36 * 128 + 3 * 2048 * 768 * 8 + 128 * 2048


LITE = Model(
    name="deepseek-v2-lite",
    source="appendix B of DeepSeek-AI 2024 (arXiv 2405.04434): the first layer is dense",
    num_layers=27,
    hidden=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=192,
    value_dim=128,
    projections=2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048,
    ffn_hidden=10944,
    vocab_size=102400,
    num_experts=64,
    num_expert_layers=26,
    expert_hidden=1408,
    top_k=6,
    shared_width=2 * 1408,
)


def test_dense_first_layers_have_no_experts() -> None:
    """15.7 billion parameters, 2.4 of them active for a token, the output layer among them."""
    assert LITE.num_parameters / 1e9 == pytest.approx(15.7, rel=0.005)
    shape = LITE.shape(expert_parallel=4)
    active = (27 * shape.dense_flops_per_token + shape.output_flops_per_token) / 2
    assert active / 1e9 == pytest.approx(2.4, rel=0.03)
    routed = 26 * 3 * 2048 * 1408 * 6
    assert 27 * shape.expert_flops_per_token == pytest.approx(2 * routed, rel=1e-12)
    beside = 3 * 2048 * 10944 + 26 * (3 * 2048 * 2816 + 64 * 2048) + 27 * LITE.attention_parameters
    assert 27 * shape.dense_flops_per_token == pytest.approx(2 * (routed + beside), rel=1e-12)
    assert 27 * shape.expert_bytes_per_token == pytest.approx(26 * 2 * 6 * 2048 * 2 * 3 / 4)


def test_an_expert_model_with_dense_layers_alone_is_dense() -> None:
    dense = dataclasses.replace(DENSE, num_experts=8, num_expert_layers=0, expert_hidden=99)
    assert dense.shape() == DENSE.shape()
    assert dense.num_parameters == DENSE.num_parameters
    plan = MemoryPlan(8)
    assert activation_bytes(dense, plan) == activation_bytes(DENSE, plan)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1, 1), "tensor parallelism 3 cannot split the 32 query and 8 key/value heads"),
        ((1, 5, 1), "pipeline parallelism 5 does not divide the 36 layers of qwen3-8b"),
        ((1, 1, 2), "expert parallelism 2 does not divide the 0 experts of qwen3-8b"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DENSE.shape(*sizes)
    with pytest.raises(ValueError, match=message):
        state_bytes(DENSE, MemoryPlan(8, *sizes))


def test_states_of_a_sharded_model() -> None:
    whole = MemoryPlan(8, shards_weights=False, shards_optimizer=False)
    assert state_bytes(DENSE, whole) == 18 * DENSE.num_parameters
    optimizer = dataclasses.replace(whole, shards_optimizer=True)
    assert state_bytes(DENSE, optimizer) == (6 + 12 / 8) * DENSE.num_parameters
    offload = dataclasses.replace(optimizer, offloads_optimizer=True)
    assert state_bytes(DENSE, offload) == 6 * DENSE.num_parameters
    gathered = 8 * DENSE.num_parameters / 36
    sharded = state_bytes(DENSE, MemoryPlan(8))
    assert sharded == pytest.approx(18 / 8 * DENSE.num_parameters + gathered)


def test_experts_are_held_by_expert_parallel_ranks_and_sharded_over_their_peers() -> None:
    plan = MemoryPlan(64, expert_parallel=8, shards_weights=False, shards_optimizer=True)
    held = A3B.shared_parameters + A3B.expert_parameters / 8
    owned = A3B.shared_parameters / 64 + A3B.expert_parameters / 64
    assert state_bytes(A3B, plan) == pytest.approx(6 * held + 12 * owned)


def test_recomputing_more_leaves_room_for_more_tokens() -> None:
    budgets = [
        token_budget(A3B, MemoryPlan(64, expert_parallel=8, recompute=policy), 80e9)
        for policy in RECOMPUTE
    ]
    assert budgets == sorted(budgets) and budgets[0] < budgets[1] < budgets[2]
    plan = MemoryPlan(64)
    states, each = state_bytes(A3B, plan) + plan.reserve_bytes, activation_bytes(A3B, plan)
    assert budgets_hold(token_budget(A3B, plan, 80e9), states, each)


def test_a_first_pipeline_rank_holds_what_the_schedule_has_in_flight() -> None:
    """Megatron's warmup by hand: 4 ranks run 6 passes for those after them, and one in turn."""
    assert [micro_batches_in_flight(stages) for stages in (1, 4)] == [1, 4]
    assert micro_batches_in_flight(4, 2) * 2 == 2 * 3 + 4 + 1
    assert micro_batches_in_flight(4, 3, group=8) * 3 == 2 * 3 + 2 * 8 + 1
    flat, virtual = (MemoryPlan(8, pipeline_parallel=4, virtual_stages=v) for v in (1, 3))
    logits = 10 * DENSE.vocab_size
    assert activation_bytes(DENSE, virtual) - logits == pytest.approx(
        (activation_bytes(DENSE, flat) - logits) / 4 * (2 * 3 + 2 * 4 + 1) / 3
    )


def budgets_hold(tokens: int, states: float, each: float) -> bool:
    """The budget fits and one token more does not."""
    return states + tokens * each <= 80e9 < states + (tokens + 1) * each


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qwen3-8b does not fit: .* take 153.4 GB of the 80.0 GB"):
        token_budget(DENSE, MemoryPlan(8, shards_weights=False, shards_optimizer=False), 80e9)
    with pytest.raises(ValueError, match="recompute must be one of none, selective, full, got all"):
        MemoryPlan(8, recompute="all")
    with pytest.raises(ValueError, match="no model gpt, only qwen3-30b-a3b"):
        known_model("gpt")
