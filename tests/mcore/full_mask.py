"""A layer whose tokens see all of their sample, as no flag of Megatron's asks for.

--spec tests.mcore.full_mask layer_spec
"""

from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.training.models.gpt import default_layer_spec


def layer_spec(config: Any) -> Any:
    """Megatron's own layer, with another mask."""
    spec = default_layer_spec(config, 0)
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    return spec
