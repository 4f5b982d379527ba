"""The small parts at the border to Megatron, each by itself."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import training

from megatron_nsp.mcore.cuda_connections import describe_connections
from megatron_nsp.mcore.fixes import at_start
from megatron_nsp.mcore.hooks import PlannedDocuments
from megatron_nsp.mcore.loss import per_token_loss
from megatron_nsp.mcore.model import hybrid_stack, model_of
from megatron_nsp.mcore.moe.layer import NestedMoELayer, exchange_experts
from megatron_nsp.mcore.moe.router import NestedRouter
from megatron_nsp.mcore.packed_seq_params import NestedSeqParams
from megatron_nsp.mcore.pretrain import Trainer
from megatron_nsp.mcore.spec import NestedCoreAttention, exchange_core_attention, nested_spec
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import Node, SPTree
from megatron_nsp.runtime.attention import NestedBatch
from megatron_nsp.runtime.backends.base import SavedOutput
from megatron_nsp.runtime.kernels import AttentionMask
from tests.mcore.launch import environment


def test_a_filler_row_never_reaches_the_loss_whatever_it_holds() -> None:
    losses = torch.tensor([[1.0, math.inf, 3.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    total, count, report = per_token_loss(losses, mask, step_has_targets=True)
    total.backward()
    assert (float(total.detach()), int(count)) == (4.0, 2) and count.dtype == torch.int32
    assert report["lm loss"].tolist() == [4.0, 2.0]
    assert losses.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_a_step_without_targets_reports_zero() -> None:
    losses = torch.tensor([[5.0, 6.0]])
    total, count, report = per_token_loss(losses, torch.zeros(1, 2), step_has_targets=False)
    assert (float(total), int(count), report["lm loss"].tolist()) == (0.0, 0, [0.0, 1.0])


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("loss", [3.0, math.nan, math.inf])
def test_megatron_is_shown_the_loss_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, loss: float, is_checked: bool
) -> None:
    rejected = []

    def validate_result(result: torch.Tensor, rejection_func: Any, message: str, **_: Any) -> None:
        rejected.append(bool(rejection_func(result)) and message.split()[1])

    machine = SimpleNamespace(validate_result=validate_result)
    monkeypatch.setattr("megatron_nsp.mcore.loss.get_rerun_state_machine", lambda: machine)
    args = SimpleNamespace(num_experts=None, check_for_nan_in_loss_and_grad=is_checked)
    trainer = Trainer(args, SimpleNamespace())  # type: ignore[arg-type]
    trainer.runtime = SimpleNamespace()  # type: ignore[assignment]
    rows = {"tokens": None, "labels": None, "loss_mask": torch.ones(1, 1)}
    nested = NestedBatch.build(Plan.from_nodes(SPTree(1, (1,)), [1], [Node(0, 0)]), 0)
    rows |= {"positions": torch.zeros(1), "further": ()}
    batch = SimpleNamespace(**rows, nested=nested, step_has_targets=True)
    losses, reduce = trainer.forward_step(
        iter([batch]), lambda *_, **__: torch.full((1, 1), loss, requires_grad=True)
    )
    assert float(reduce(losses)[1]) == 1.0
    expected = {3.0: [False, False], math.inf: [False, "Inf"]}.get(loss, ["NaN", False])
    assert rejected == (expected if is_checked else [])


def test_a_run_without_a_folder_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    monkeypatch.setattr(training, "save_checkpoint_and_time", saved.append)
    for _ in range(2):
        at_start.apply()
    for iteration, folder in enumerate((None, "checkpoints")):
        flags = SimpleNamespace(save=folder)
        monkeypatch.setattr(training, "get_args", lambda flags=flags: flags)
        training.save_checkpoint_and_time(iteration)
    assert saved == [1]


def config(**fields: object) -> SimpleNamespace:
    """What core attention reads of a transformer configuration."""
    defaults = {"softmax_scale": None, "kv_channels": 16, "attention_dropout": 0.0}
    masks = {"window_size": None, "window_attn_skip_freq": None, "softmax_type": "vanilla"}
    recomputation = {"recompute_granularity": None, "fine_grained_activation_offloading": False}
    return SimpleNamespace(**{**defaults, **masks, **recomputation, **fields})


@pytest.mark.parametrize(
    ("of_config", "of_layer", "expected"), [(None, None, 0.25), (0.5, None, 0.5), (0.5, 0.1, 0.1)]
)
def test_softmax_scale(of_config: float | None, of_layer: float | None, expected: float) -> None:
    attention = NestedCoreAttention(
        config(softmax_scale=of_config),
        1,
        AttnMaskType.causal,
        "self",
        softmax_scale=of_layer,
        cp_comm_type="p2p",
    )
    assert attention.mask == AttentionMask(expected)


@pytest.mark.parametrize(
    ("window", "skip", "expected"),
    [
        ((7, 0), None, [7, 7, 7, 7]),
        ((0, 0), 2, [0, None, 0, None]),
        ((7, 0), 3, [7, 7, None, 7]),
        ((7, 0), 1, [None] * 4),
        ((7, 0), [0, 1, 1, 0], [None, 7, 7, None]),
        ((-1, 0), None, [None] * 4),
        (None, 2, [None] * 4),
    ],
)
def test_which_layers_have_a_window(
    window: tuple[int, int] | None, skip: int | list[int] | None, expected: list[int | None]
) -> None:
    settings = config(window_size=window, window_attn_skip_freq=skip)
    layers = [
        NestedCoreAttention(settings, number, AttnMaskType.causal, "self") for number in range(1, 5)
    ]
    assert [layer.mask.window_left for layer in layers] == expected


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [("causal", True), ("padding_causal", True), ("no_mask", False), ("padding", False)],
)
def test_masks(mask: str, is_causal: bool) -> None:
    attention = NestedCoreAttention(config(), 1, AttnMaskType[mask], "self")
    assert attention.mask.is_causal is is_causal


def test_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="full self attention, got cross attention"):
        NestedCoreAttention(config(), 1, AttnMaskType.causal, "cross")
    with pytest.raises(ValueError, match=r"mask AttnMaskType\.arbitrary"):
        NestedCoreAttention(config(), 1, AttnMaskType.arbitrary, "self")
    with pytest.raises(ValueError, match="a sliding window needs a causal mask"):
        NestedCoreAttention(config(window_size=(4, 0)), 1, AttnMaskType.no_mask, "self")
    with pytest.raises(ValueError, match=r"--attention-dropout must be 0, got 0\.1"):
        NestedCoreAttention(config(), 1, AttnMaskType.causal, "self", attention_dropout=0.1)
    with pytest.raises(ValueError, match="no self-attention to exchange"):
        exchange_core_attention(SimpleNamespace(submodules=SimpleNamespace()))


def test_a_spec_may_be_one_layer_or_a_block_or_a_stack_or_make_one() -> None:
    def layer() -> SimpleNamespace:
        attention = SimpleNamespace(core_attention=None)
        submodules = SimpleNamespace(self_attention=SimpleNamespace(submodules=attention))
        return SimpleNamespace(submodules=submodules, attention=attention)

    one, two, three = layer(), layer(), layer()
    stack = SimpleNamespace(attention_layer=two, mla_layer=three, moe_layer=None)
    for spec, layers in (
        (one, [one]),
        (SimpleNamespace(layer_specs=[one, two]), [one, two]),
        (SimpleNamespace(submodules=stack), [two, three]),
        (lambda config: one, [one]),
        (lambda config, vp_stage: one if vp_stage == 3 else two, [one]),
    ):
        nested_spec(spec)(None, 3)
        for each in layers:
            assert each.attention.core_attention is NestedCoreAttention
            each.attention.core_attention = None
    assert exchange_core_attention(SimpleNamespace(layer_specs=[])).layer_specs == []


def test_megatrons_own_stack_of_a_hybrid_model_takes_nested_attention() -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    spec = exchange_core_attention(hybrid_stack())
    for layer in ("attention_layer", "mla_layer"):
        own, nested = (
            getattr(each.submodules, layer).submodules.self_attention.submodules.core_attention
            for each in (hybrid_stack_spec, spec)
        )
        assert nested is NestedCoreAttention and own is not NestedCoreAttention


def test_experts_are_exchanged_once_and_in_a_copy_of_megatrons_stack() -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    spec = exchange_core_attention(exchange_core_attention(hybrid_stack()))
    own, nested = (each.submodules.moe_layer for each in (hybrid_stack_spec, spec))
    assert nested.submodules.mlp.func is NestedMoELayer
    assert nested.submodules.mlp.keywords["submodules"].router is NestedRouter
    assert nested.module.__bases__ == (own.module,)
    assert own.submodules.mlp.func is MoELayer
    assert own.submodules.mlp.keywords["submodules"].router is TopKRouter


def test_experts_that_may_count_the_tokens_of_one_rank_are_refused() -> None:
    class OwnRouter(TopKRouter):
        pass

    class OwnExperts(MoELayer):
        pass

    for experts, router in ((MoELayer, OwnRouter), (OwnExperts, TopKRouter)):
        made_of = MoESubmodules(experts=SimpleNamespace, router=router)
        mlp = ModuleSpec(module=experts, submodules=made_of)
        layer = SimpleNamespace(submodules=SimpleNamespace(mlp=mlp))
        words = f"--spec has experts of {experts.__name__} with {router.__name__}: only"
        with pytest.raises(ValueError, match=words):
            exchange_experts(layer)


def model_args(**fields: object) -> SimpleNamespace:
    """What the planner's model is made of: DeepSeek-V2-Lite's attention in two layers."""
    sizes = {"num_layers": 2, "hidden_size": 2048, "num_attention_heads": 16, "kv_channels": 128}
    sizes |= {"kv_lora_rank": 512, "q_lora_rank": None, "qk_head_dim": 128, "v_head_dim": 128}
    sizes |= {"qk_pos_emb_head_dim": 64, "ffn_hidden_size": 10944, "padded_vocab_size": 102400}
    flags = {"group_query_attention": False, "num_query_groups": 1, "num_experts": None}
    flags |= {"moe_router_topk": 1, "swiglu": True, "multi_latent_attention": True}
    flags |= {"untie_embeddings_and_output_weights": True, "window_size": None}
    flags |= {"hybrid_layer_pattern": None, "pipeline_model_parallel_size": 1}
    flags |= {"moe_shared_expert_intermediate_size": None, "moe_ffn_hidden_size": None}
    flags |= {"moe_layer_freq": 1, "decoder_first_pipeline_num_layers": None}
    flags |= {"decoder_last_pipeline_num_layers": None, "pipeline_model_parallel_layout": None}
    flags |= {"num_layers_per_virtual_pipeline_stage": None, "mtp_num_layers": None}
    flags |= {"num_virtual_stages_per_pipeline_rank": None}
    flags |= {"account_for_embedding_in_pipeline_split": False}
    flags |= {"account_for_loss_in_pipeline_split": False}
    flags |= {"heterogeneous_layers_config_encoded_json": None}
    flags |= {"mtp_num_layers": None, "mtp_use_repeated_layer": False}
    return SimpleNamespace(**{**sizes, **flags, "window_attn_skip_freq": None, **fields})


def test_the_planner_knows_latent_heads_and_their_projections() -> None:
    model = model_of(model_args())  # type: ignore[arg-type]
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.value_dim) == (
        *(16, 16),
        *(192, 128),
    )
    query, down, up, out = 2048 * 16 * 192, 2048 * (512 + 64), 512 * 16 * 256, 16 * 128 * 2048
    assert model.attention_parameters == query + down + up + out
    compressed = model_of(model_args(q_lora_rank=100))  # type: ignore[arg-type]
    query = 100 * (2048 + 16 * 192)
    assert compressed.attention_parameters == query + down + up + out
    plain = model_of(model_args(multi_latent_attention=False))  # type: ignore[arg-type]
    assert (plain.head_dim, plain.value_width) == (128, 128)
    assert plain.attention_parameters == 4 * 2048 * 16 * 128


def test_the_planner_knows_the_windows() -> None:
    args = model_args(num_layers=6, window_size=(9, 0), window_attn_skip_freq=3)
    shape = model_of(args).shape(pipeline_parallel=2)  # type: ignore[arg-type]
    assert (shape.num_layers, shape.num_windowed_layers, shape.window_left) == (3, 2, 9)


def test_the_planner_counts_further_tokens_as_layers_of_the_last_stage_with_an_output_each() -> (
    None
):
    windows = {"window_size": (9, 0), "window_attn_skip_freq": [0, 1, 0, 0]}
    sizes = {"num_layers": 4, "pipeline_model_parallel_size": 2, "mtp_num_layers": 2}
    model = model_of(model_args(**sizes, **windows))  # type: ignore[arg-type]
    assert (model.num_layers, model.mlps, model.num_windowed_layers) == (8, 8, 2)
    shape = model.shape(pipeline_parallel=2)
    assert (shape.num_layers, shape.output_flops_per_token) == (4, 3 * 2 * 102400 * 2048)
    sizes["mtp_use_repeated_layer"] = True
    repeated = model_of(model_args(**sizes, **windows))  # type: ignore[arg-type]
    assert (repeated.num_layers, repeated.num_windowed_layers) == (8, 1)  # layer 1, twice
    sizes |= {"num_experts": 4, "moe_layer_freq": [0, 0, 0, 1]}
    assert model_of(model_args(**sizes)).expert_layers == 2 * 3  # type: ignore[arg-type]


def test_the_planner_knows_the_layers_of_a_hybrid_model() -> None:
    pattern = {"hybrid_layer_pattern": "*-*E-|*E", "num_layers": 7, "num_experts": 4}
    pattern |= {"pipeline_model_parallel_size": 2}
    sizes = {"ffn_hidden_size": 300, "moe_ffn_hidden_size": 60}
    args = model_args(**pattern, **sizes, window_size=(9, 0), window_attn_skip_freq=3)
    model = model_of(args)  # type: ignore[arg-type]
    assert (model.num_layers, model.mlps, model.expert_layers) == (4, 4, 2)
    assert model.num_windowed_layers == 1  # layers 1, 3 and 6, of which 3 and 6 are skipped
    dense = model_of(model_args(hybrid_layer_pattern="*-*---", num_layers=6))  # type: ignore[arg-type]
    assert (dense.num_layers, dense.mlps, dense.expert_layers) == (2, 4, 0)
    parameters = 2 * dense.attention_parameters + 4 * 3 * 2048 * 10944
    assert 2 * dense.shape().dense_flops_per_token == 2 * parameters


@pytest.mark.parametrize(
    ("frequency", "num_experts"),
    [(1, 6), (2, 3), (3, 2), ([0, 1, 1, 1, 1, 1], 5), ([0] * 6, 0), ([1, 0, 0, 1, 0, 0], 2)],
)
def test_the_planner_counts_experts_in_the_layers_that_have_them(
    frequency: int | list[int], num_experts: int
) -> None:
    """DeepSeek-V2-Lite's layers, of which Megatron's own count says how many have experts."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    sizes = {"num_experts": 64, "moe_router_topk": 6, "moe_ffn_hidden_size": 1408}
    sizes |= {"moe_shared_expert_intermediate_size": 2816, "num_layers": 6}
    model = model_of(model_args(**sizes, moe_layer_freq=frequency))  # type: ignore[arg-type]
    assert MoEMetricsTracker._count_moe_layers(6, frequency, None) == num_experts
    shape = model.shape(expert_parallel=2)
    experts = num_experts * 3 * 2048 * 1408 * 6
    others = (6 - num_experts) * 3 * 2048 * 10944 + num_experts * (3 * 2048 * 2816 + 64 * 2048)
    others += 6 * model.attention_parameters
    assert 6 * shape.expert_flops_per_token == pytest.approx(2 * experts, rel=1e-12)
    assert 6 * shape.dense_flops_per_token == pytest.approx(2 * (experts + others), rel=1e-12)
    exchanged = num_experts * 2 * 6 * 2048 * 2 / 2
    assert 6 * shape.expert_bytes_per_token == pytest.approx(exchanged, rel=1e-12)


def test_a_pipeline_is_as_slow_as_its_widest_stage() -> None:
    """Dense layers on the first of three stages: it has less work than the others."""
    sizes = {"num_experts": 64, "moe_router_topk": 6, "moe_ffn_hidden_size": 2048, "num_layers": 6}
    sizes |= {"ffn_hidden_size": 100, "moe_layer_freq": [0, 0, 1, 1, 0, 1]}
    model = model_of(model_args(**sizes, pipeline_model_parallel_size=3))  # type: ignore[arg-type]
    assert (model.num_layers, model.mlps, model.expert_layers) == (6, 0, 6)
    wide = model_args(**sizes | {"ffn_hidden_size": 99999}, pipeline_model_parallel_size=3)
    assert model_of(wide).mlps == 6  # type: ignore[arg-type]


def test_the_planner_knows_layers_that_differ() -> None:
    """Attention and MLPs of their own widths, left out, or one matrix in their place."""
    none, linear = {"no_op": True}, {"replace_with_linear": True}
    layers = (({}, 1.0), (none, 3.25), (linear, linear), ({}, none))
    blocks = [
        {
            "attention": {"n_heads_in_group": None, **attention},
            "ffn": {"ffn_mult": mlp} if isinstance(mlp, float) else {"ffn_mult": None, **mlp},
        }
        for attention, mlp in layers
    ]
    encoded = json.dumps({"block_configs": blocks})
    how = {
        "num_layers": 4,
        "hidden_size": 1536,
        "heterogeneous_layers_config_encoded_json": encoded,
    }
    model = model_of(model_args(**how, window_size=(9, 0)))  # type: ignore[arg-type]
    # An MLP has two thirds of ffn_mult times the width; a linear layer is one of its 3 matrices.
    widths = 1024 + 3328 + 2 * 1536 // 3
    parameters = 2 * model.attention_parameters + 3 * 1536 * widths
    assert 2 * model.shape().dense_flops_per_token == 2 * parameters
    assert (model.num_layers, model.mlps, model.num_windowed_layers) == (2, 3, 2)


def test_uneven_stages_count_as_the_one_with_most_layers() -> None:
    uneven = {"num_layers": 7, "pipeline_model_parallel_size": 2}
    model = model_of(model_args(**uneven, decoder_first_pipeline_num_layers=3))  # type: ignore[arg-type]
    assert (model.num_layers, model.shape(pipeline_parallel=2).num_layers) == (8, 4)


def test_rotary_rows_are_megatrons_own_at_each_position() -> None:
    """In a process of its own: Megatron's module wants a device, which CPU mode stands in for."""
    code = (
        "from megatron_nsp.mcore.cpu.mode import enable_cpu_mode\n"
        "enable_cpu_mode()\n"
        "import torch\n"
        "from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding\n"
        "from megatron_nsp.mcore.rope import NestedRotaryEmbedding\n"
        "positions = torch.tensor([0, 1, 2, 0, 7, 31, 5])\n"
        "for interleaved in (False, True):\n"
        "    for factor in (None, 4.0):\n"
        "        how = dict(use_cpu_initialization=True)\n"
        "        inner = RotaryEmbedding(16, 0.5, interleaved, factor, **how)\n"
        "        table = inner.get_emb(32)[positions]\n"
        "        for latent, expected in ((False, table), (True, table[:, 0])):\n"
        "            rows = NestedRotaryEmbedding(inner, latent)(positions)\n"
        "            torch.testing.assert_close(rows, expected, rtol=0, atol=0)\n"
        "from megatron.core.models.common.embeddings import YarnRotaryEmbedding\n"
        "inner = YarnRotaryEmbedding(16, scaling_factor=8.0, original_max_position_embeddings=64)\n"
        "table, factor = inner.get_emb(32)\n"
        "rows, concentration = NestedRotaryEmbedding(inner)(positions)\n"
        "torch.testing.assert_close(rows, table[positions], rtol=0, atol=0)\n"
        "assert concentration == factor != 1.0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment(), check=True)


def test_m16_far_positions_keep_their_angles_in_models_of_16_bits() -> None:
    """Against Megatron's own float32 rows, and against cosines in float64 where those are near."""
    code = (
        "from megatron_nsp.mcore.cpu.mode import enable_cpu_mode\n"
        "enable_cpu_mode()\n"
        "import torch\n"
        "from megatron.core.models.common.embeddings import RotaryEmbedding\n"
        "from megatron.core.models.common.embeddings import YarnRotaryEmbedding\n"
        "from megatron_nsp.mcore.rope import NestedRotaryEmbedding\n"
        "far = torch.tensor([0, 257, 4097, 32769, 65535, 131071, 2**20 - 1])\n"
        "for base in (10_000, 1_000_000):\n"
        "    for factor in (None, 4.0):\n"
        "        how = dict(rotary_base=base, use_cpu_initialization=True)\n"
        "        inner = RotaryEmbedding(16, 1.0, False, factor, **how)\n"
        "        table = inner.get_emb(2**20)[far]\n"
        "        pairs = torch.arange(8, dtype=torch.float64)\n"
        "        exact = torch.outer(far.double() / (factor or 1.0), base ** (-pairs / 8))\n"
        "        for dtype in (torch.float16, torch.bfloat16):\n"
        "            module = torch.nn.Sequential(NestedRotaryEmbedding(inner)).to(dtype)\n"
        "            rows = module(far)\n"
        "            assert rows.dtype == torch.float32 and torch.equal(rows, table)\n"
        "            errors = rows[:, 0, 0, :8].double().cos() - exact.cos()\n"
        "            assert errors[:6].abs().max() < 0.03, errors\n"
        "inner = YarnRotaryEmbedding(\n"
        "    16, scaling_factor=32.0, original_max_position_embeddings=64)\n"
        "module = NestedRotaryEmbedding(inner).to(torch.bfloat16)\n"
        "table, factor = inner.get_emb(2**20)\n"
        "rows, concentration = module(far)\n"
        "assert torch.equal(rows, table[far]) and concentration == factor\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment(), check=True)


def test_every_pass_over_a_batch_begins_with_nothing_kept_and_keeps_its_own() -> None:
    """Of a step that runs once more, and of the chunks of a model on one pipeline rank."""
    plan = Plan.from_nodes(SPTree(1, (1,)), [5], [Node(0, 0)])
    batch = NestedBatch.build(plan, 0)
    rows = torch.zeros(5, 1, 2)
    runtime, positions = SimpleNamespace(), torch.arange(5)
    one, other = (NestedSeqParams.of(batch, runtime, positions).nested for _ in range(2))  # type: ignore[arg-type]
    assert one is not None and other is not None
    one.saved_outputs[1] = {Node(0, 0): SavedOutput(1, rows, torch.zeros(1, 5))}
    assert not batch.saved_outputs and not other.saved_outputs
    assert one._rows is other._rows and one._steps is other._steps  # prepared once for both


@pytest.mark.parametrize("first", [0, 1])
def test_chunks_of_a_model_draw_the_same_micro_batches_made_once(first: int) -> None:
    made: list[int] = []

    def micro_batches() -> Iterator[Any]:
        for number in range(4):
            made.append(number)
            yield number

    documents = PlannedDocuments(micro_batches, num_chunks=2)
    chunks = [documents.iterator(), documents.iterator()]
    order = [first, first, 1 - first, first, 1 - first, 1 - first]
    assert [next(chunks[chunk]) for chunk in order] == [0, 1, 0, 2, 1, 2]
    assert made == [0, 1, 2]


@pytest.mark.parametrize("value", [None, "1", "8", "32"])
@pytest.mark.parametrize("overlap", [True, False])
def test_i4_one_hardware_queue_is_said_and_warned_of_once(value: str | None, overlap: bool) -> None:
    lines = describe_connections(value, overlap)
    assert lines[0].endswith("not set" if value is None else f" {value}")
    assert [("warning" in line) for line in lines[1:]] == [True] * (value == "1" and overlap)
