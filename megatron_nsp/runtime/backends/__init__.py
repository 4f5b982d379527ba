"""The mechanism of each backend of `plan.backends`, under the same name."""

from typing import Any

from megatron_nsp.plan.split import Split
from megatron_nsp.runtime.backends.base import Backend
from megatron_nsp.runtime.backends.blocks import key_mask
from megatron_nsp.runtime.backends.gather import Gather
from megatron_nsp.runtime.backends.node import HeadsAndKeys
from megatron_nsp.runtime.backends.ring import Ring
from megatron_nsp.runtime.backends.te import TransformerEngine
from megatron_nsp.runtime.kernels.base import AttentionMask

MECHANISMS: dict[str, Backend[Any, Any]] = {
    "ring": HeadsAndKeys(Ring),
    "gather": HeadsAndKeys(Gather),
    "te-p2p": TransformerEngine("p2p"),
    "te-a2a": TransformerEngine("a2a"),
}


def mechanism(split: Split, mask: AttentionMask) -> Backend[Any, Any]:
    """What runs a node that is split so, in a layer with this mask."""
    return MECHANISMS[split.under(key_mask(mask)).name]
