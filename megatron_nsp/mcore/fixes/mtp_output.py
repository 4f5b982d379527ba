"""The output layer of a last stage that predicts further tokens, tied to the embedding.

Such a stage has the embedding beside the output layer, and Megatron 0.19.x hands the layer that
weight. The layer is given one of its own nevertheless: no gradient reaches it, so overlapped
reduction of gradients waits for it in vain, and checkpoints stop with an assertion that it is not
there. Can go when GPTModel allocates none where `mtp_process` is set.
"""

from typing import Any

from torch import nn


def drop_idle_output_weight(models: list[nn.Module]) -> list[nn.Module]:
    """Takes that weight away; a pre-wrap hook."""
    for model in models:
        stage: Any = model
        is_tied = stage.post_process and stage.share_embeddings_and_output_weights
        if is_tied and stage.mtp_process and not stage.pre_process:
            stage.output_layer.weight = None
    return models
