"""The small parts at the border to Megatron, each by itself."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_nsp.mcore.connections import describe_connections
from megatron_nsp.mcore.loss import per_token_loss
from megatron_nsp.mcore.spec import NestedCoreAttention, exchange_core_attention
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


@pytest.mark.parametrize(
    ("of_config", "of_layer", "expected"), [(None, None, 0.25), (0.5, None, 0.5), (0.5, 0.1, 0.1)]
)
def test_softmax_scale(of_config: float | None, of_layer: float | None, expected: float) -> None:
    config = SimpleNamespace(softmax_scale=of_config, kv_channels=16)
    attention = NestedCoreAttention(
        config, 1, AttnMaskType.causal, "self", softmax_scale=of_layer, cp_comm_type="p2p"
    )
    assert attention.softmax_scale == expected


def test_other_attention_is_refused() -> None:
    config = SimpleNamespace(softmax_scale=None, kv_channels=16)
    with pytest.raises(ValueError, match="causal self attention, got cross attention"):
        NestedCoreAttention(config, 1, AttnMaskType.causal, "cross")
    with pytest.raises(ValueError, match=r"mask AttnMaskType\.no_mask"):
        NestedCoreAttention(config, 1, AttnMaskType.no_mask, "self")
    with pytest.raises(ValueError, match="no self-attention to exchange"):
        exchange_core_attention(SimpleNamespace(submodules=SimpleNamespace()))


def test_rotary_rows_are_megatrons_own_at_each_position() -> None:
    """In a process of its own: Megatron's module wants a device, which CPU mode stands in for."""
    code = (
        "from megatron_nsp.mcore.cpu import enable_cpu_mode\n"
        "enable_cpu_mode()\n"
        "import torch\n"
        "from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding\n"
        "from megatron_nsp.mcore.rope import NestedRotaryEmbedding\n"
        "positions = torch.tensor([0, 1, 2, 0, 7, 31, 5])\n"
        "for interleaved in (False, True):\n"
        "    for factor in (None, 4.0):\n"
        "        how = dict(use_cpu_initialization=True)\n"
        "        inner = RotaryEmbedding(16, 0.5, interleaved, factor, **how)\n"
        "        rows = NestedRotaryEmbedding(inner)(positions)\n"
        "        torch.testing.assert_close(rows, inner.get_emb(32)[positions], rtol=0, atol=0)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment(), check=True)


@pytest.mark.parametrize("value", [None, "1", "8", "32"])
@pytest.mark.parametrize("overlap", [True, False])
def test_i4_one_hardware_queue_is_said_and_warned_of_once(value: str | None, overlap: bool) -> None:
    lines = describe_connections(value, overlap)
    assert lines[0].endswith("not set" if value is None else f" {value}")
    assert [("warning" in line) for line in lines[1:]] == [True] * (value == "1" and overlap)
