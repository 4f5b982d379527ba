"""The independent reference: Megatron alone, one whole document at a time, in double precision.

Nothing of the product takes part but CPU mode: Megatron's own layer spec, DotProductAttention and
rotary embedding, tokens straight from the .bin file, labels shifted here. Megatron has no attention
on CPU whose values have another head dim than its queries: latent attention gets one from here.
Its arguments are OUT and flags of Megatron. Writes OUT: every token's loss by document and
position, and every parameter's gradient of the mean loss over all targets.
"""

import sys
from itertools import pairwise
from typing import Any

from megatron_nsp.mcore.cpu.args import set_cpu_defaults
from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

enable_cpu_mode(float64=True)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core.datasets import utils as dataset_utils  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    hybrid_config_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.checkpointing import load_checkpoint  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder, default_layer_spec  # noqa: E402
from megatron.training.models.hybrid import HybridModelBuilder  # noqa: E402


def defaults(parser: Any) -> Any:
    """CPU mode's settings, and the prefix and lengths of the documents."""
    set_cpu_defaults(parser)
    parser.set_defaults(attention_dropout=0.0, micro_batch_size=1, eval_interval=1)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--nsp-cpu", action="store_true")
    return parser


class LatentAttention(MegatronModule):
    """Causal attention by its definition, with values of any head dim."""

    def __init__(self, config: Any, softmax_scale: float, **_: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(self, q_SBHD: Any, k_SBHD: Any, v_SBHV: Any, *_: Any, **__: Any) -> Any:
        scores = torch.einsum("sbhd,tbhd->bhst", q_SBHD, k_SBHD) * self.softmax_scale
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhst,tbhv->sbhv", weights, v_SBHV).flatten(2)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's own spec, with the attention above where attention is latent."""
    spec = default_layer_spec(config, vp_stage)
    if config.transformer.multi_latent_attention:
        spec.submodules.self_attention.submodules.core_attention = LatentAttention
    return spec


def build(args: Any) -> Any:
    """Megatron's builder of the model."""
    if args.hybrid_layer_pattern:
        return HybridModelBuilder(hybrid_config_from_args(args))
    config = gpt_config_from_args(args)
    config.transformer_layer_spec = config.transformer_layer_spec or layer_spec
    return GPTModelBuilder(config)


def main(argv: list[str]) -> None:
    """Runs all documents through the model once."""
    out, *sys.argv[1:] = argv
    args = parse_and_validate_args(defaults)
    dataset_utils.compile_helpers = lambda *_: None  # the wheel cannot build them
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = build(args).build_model(groups)
    load_checkpoint([model], None, None)
    tokens = torch.from_numpy(np.fromfile(f"{args.documents}.bin", np.uint8).astype(np.int64))
    lengths = [int(length) for length in args.lengths.split(",")]
    total, losses = torch.zeros(()), {}
    for document, (start, stop) in enumerate(pairwise(np.cumsum([0, *lengths]).tolist())):
        own = tokens[start:stop]
        if len(own) < 2:
            continue
        size, targets = len(own) - 1, own.roll(-1)  # the last token predicts nothing
        place = torch.arange(size + 1)
        # Without a mask Megatron makes that of the layer.
        rows = model(own[None], place[None], None, labels=targets[None])[0, :size]
        losses |= {(document, place): float(rows[place]) for place in range(size)}
        total = total + rows.sum()
    (total / len(losses)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.save({"losses": losses, "grads": grads}, out)
