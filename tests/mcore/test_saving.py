"""What the flags of recomputation mean for the bytes that a rank keeps."""

from types import SimpleNamespace

import pytest

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.cost.profile import load_profile
from megatron_nsp.cost.shape import ModelShape
from megatron_nsp.mcore.layers import recompute_share, recomputed, recomputed_layers
from megatron_nsp.mcore.model import saved_sizes
from megatron_nsp.plan.tree import SPTree

SHAPE = ModelShape.from_hidden(6, 64, 8, 2, 16, bytes_per_element=2)


def arguments(**changed: object) -> SimpleNamespace:
    """Megatron's arguments of a model of 12 layers on two pipeline stages."""
    usual = {
        "num_layers": 12,
        "hybrid_layer_pattern": None,
        "pipeline_model_parallel_size": 2,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
        "mtp_num_layers": None,
        "fine_grained_activation_offloading": False,
        "offload_modules": [],
    }
    return SimpleNamespace(**usual | changed)


@pytest.mark.parametrize(
    ("changed", "layers", "cost_says"),
    [
        ({}, 0, "none"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, 6, "full"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, 0, "none"),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 4,
            },
            4,
            "full",
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 9,
            },
            6,
            "full",
        ),
        ({"recompute_granularity": "selective"}, 6, "selective"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, 0, "none"),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "mtp_num_layers": 2,
            },
            8,
            "full",
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 2,
                "mtp_num_layers": 2,
            },
            2,
            "full",
        ),
        ({"recompute_activations": True}, 6, "selective"),
        ({"recompute_activations": True, "decoder_last_pipeline_num_layers": 4}, 8, "selective"),
        (
            {
                "recompute_activations": True,
                "num_layers": 13,
                "pipeline_model_parallel_size": 4,
                "decoder_first_pipeline_num_layers": 1,
                "decoder_last_pipeline_num_layers": 2,
            },
            5,
            "selective",
        ),
    ],
)
def test_recomputed_layers_of_the_stage_that_has_most(
    changed: dict[str, object], layers: int, cost_says: str
) -> None:
    args = arguments(**changed)
    assert recomputed_layers(args) == layers
    if "recompute_activations" in changed:  # as Megatron's validation leaves it
        args = arguments(**changed | {"recompute_granularity": "selective"})
    assert recomputed(args) == cost_says
    assert recompute_share(args) == {0: 0, 2: 2 / 8, 4: 4 / 6}.get(layers, 1)


def test_every_chunk_of_a_rank_recomputes_its_first_layers() -> None:
    """Two of each, but the one layer of the last: 2 + 2 of 8 layers, and 2 + 1 of 4."""
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    args = arguments(
        **block, recompute_num_layers=2, pipeline_model_parallel_layout="Ettttt|ttt|ttt|tL"
    )
    assert (recomputed_layers(args), recompute_share(args)) == (4, 4 / 8)


def test_the_output_costs_nothing_where_attention_alone_is_recomputed() -> None:
    full = arguments(recompute_granularity="full", recompute_method="uniform")
    assert saved_sizes(full, SHAPE).bytes_per_token == 6 * (8 * 16 * 2 + 8 * 4)
    selective = arguments(recompute_granularity="selective")
    assert saved_sizes(selective, SHAPE).bytes_per_token == 6 * 8 * 4
    moved = {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]}
    offloaded = arguments(recompute_granularity="selective", **moved)  # it is freed meanwhile
    assert saved_sizes(offloaded, SHAPE).bytes_per_token == saved_sizes(full, SHAPE).bytes_per_token


def test_the_planner_counts_on_as_many_tokens_as_the_budget_has_room_for() -> None:
    cost = CostModel(load_profile("h100-ib"), SHAPE, SPTree(4, (1, 2, 4)), recompute="full")
    output = saved_sizes(arguments(recompute_granularity="full", recompute_method="uniform"), SHAPE)
    budget = 1000 * output.bytes_per_token
    assert cost.with_saving(budget, output).save_tokens == 1000
    assert cost.with_saving(budget - 1, output).save_tokens == 999
    assert cost.with_saving(float("inf"), output).save_tokens == 2**31 - 1
