"""The independent reference: Megatron alone, one whole document at a time, in double precision.

Nothing of the product takes part but CPU mode: Megatron's own layer spec, DotProductAttention and
rotary embedding, tokens straight from the .bin file, labels shifted here. Megatron has no attention
on CPU whose values have another head dim than its queries: latent attention gets one from here.
Its arguments are OUT and flags of Megatron. Writes OUT: every token's loss by document and
position, the mean loss of each depth of multi-token prediction, and every parameter's gradient of
the mean loss over all targets, with those of the depths in their weight.
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
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler  # noqa: E402
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
    parser.add_argument("--megatrons-mtp-loss", action="store_true")
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


class FurtherLosses:
    """The losses of multi-token prediction by their definition: sums over documents for each depth.

    Where `--megatrons-mtp-loss` is given Megatron adds the gradients of its own loss, which is
    that of one document; otherwise its weight is 0 and that of these is not.
    """

    def __init__(self, model: Any, args: Any) -> None:
        self.model, self.sums = model, [torch.zeros(())] * (args.mtp_num_layers or 0)
        self.weight = 0.0
        if self.sums:
            model.mtp.register_forward_hook(lambda module, args, states: self.take(states))
            if not args.megatrons_mtp_loss:
                self.weight = model.config.mtp_loss_scaling_factor / len(self.sums)
                model.config.mtp_loss_scaling_factor = 0.0

    def take(self, states: Any) -> None:
        """Keeps the hidden states of the model and of each depth."""
        self.states = states.chunk(1 + len(self.sums))

    def add(self, own: Any) -> None:
        """Adds the losses of a document that has just run."""
        for depth, so_far in enumerate(self.sums, 1):
            targets = own[1 + depth :]
            weight = None
            if self.model.share_embeddings_and_output_weights:
                weight = self.model.embedding.word_embeddings.weight
            logits, _ = self.model.output_layer(self.states[depth], weight=weight)
            known = logits[: len(targets), 0]
            losses = torch.nn.functional.cross_entropy(known, targets, reduction="sum")
            self.sums[depth - 1] = so_far + losses

    def means(self, lengths: list[int]) -> list[Any]:
        """The mean loss of each depth."""
        return [
            total / sum(max(0, length - 1 - depth) for length in lengths)
            for depth, total in enumerate(self.sums, 1)
        ]


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
    total, losses, further = torch.zeros(()), {}, FurtherLosses(model, args)
    for document, (start, stop) in enumerate(pairwise(np.cumsum([0, *lengths]).tolist())):
        own = tokens[start:stop]
        if len(own) < 2:
            continue
        size, targets = len(own) - 1, own.roll(-1)  # the last token predicts nothing
        place = torch.arange(size + 1)
        # Without a mask Megatron makes that of the layer.
        is_target = (place < size).float()[None]
        rows = model(own[None], place[None], None, labels=targets[None], loss_mask=is_target)
        rows = rows[0, :size]
        further.add(own)
        losses |= {(document, place): float(rows[place]) for place in range(size)}
        total = total + rows.sum()
    means = further.means(lengths)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / len(losses)))
    (total / len(losses) + further.weight * sum(means)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    mtp_losses = [float(mean) for mean in means]
    torch.save({"losses": losses, "mtp_losses": mtp_losses, "grads": grads}, out)
