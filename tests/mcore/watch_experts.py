"""What the probe writes down of experts; and Megatron's own router as the oracle of one rank.

Import it after CPU mode is on.
"""

from typing import Any

import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import training

from megatron_nsp.mcore.moe.router import NestedRouter
from tests.mcore import watch
from tests.mcore.gradients import global_name


def watch_figures() -> None:
    """Saves the figures that Megatron logs of a step, unrounded, a value a layer."""
    log_per_layer = MoEMetricsTracker._aggregate

    def watched(self: MoEMetricsTracker, loss_scale: float, *args: Any) -> Any:
        watch.STEPS[-1]["figures"] = {
            name: (entry.values * loss_scale).tolist() for name, entry in self.metrics.items()
        }
        return log_per_layer(self, loss_scale, *args)

    MoEMetricsTracker._aggregate = watched


def watch_biases() -> None:
    """Saves the bias of every expert as a step has left it."""
    setup = training.setup_model_and_optimizer

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        models, step = result[0], result[1].step

        def logged_step(*a: Any, **k: Any) -> Any:
            done = step(*a, **k)
            watch.STEPS[-1]["biases"] = {
                global_name(name): buffer.clone()
                for model in models
                for name, buffer in model.named_buffers()
                if name.endswith("expert_bias")
            }
            return done

        result[1].step = logged_step
        return result

    training.setup_model_and_optimizer = watched


def route_as_megatron() -> None:
    """Has one rank route, count and balance with Megatron's own code, without a mask.

    Of `seq_aux_loss` every document is a sequence that Megatron has alone.
    """
    for name in ("is_aux_loss_enabled", "apply_z_loss", "_apply_expert_bias"):
        setattr(NestedRouter, name, getattr(TopKRouter, name))

    def routing(self: NestedRouter, logits: torch.Tensor, padding_mask: Any) -> Any:
        if padding_mask.num_tokens:
            assert not padding_mask.is_filler.any()
            return TopKRouter.routing(self, logits)
        with torch.no_grad():  # a micro-batch of one filler row
            return TopKRouter.routing(self, logits)

    def seq_aux_loss(
        self: NestedRouter, probs: Any, scores: Any, routing_map: Any, *_: Any, **__: Any
    ) -> Any:
        documents = torch.tensor([document for document, _ in watch.ROWS])
        record = MoEMetricsTracker.record
        for document in documents.unique():
            rows = (documents == document).nonzero().flatten()

            def weighed(tracker: Any, name: str, value: Any, *a: Any, **k: Any) -> None:
                share = len(rows) / len(documents)  # noqa: B023 - called in this round alone
                record(tracker, name, value * share, *a, **k)

            moe_logging.MoEMetricsTracker.record = weighed
            probs = TopKRouter._apply_seq_aux_loss(
                self, probs, scores[rows], routing_map[rows], len(rows), 1
            )
        moe_logging.MoEMetricsTracker.record = record
        return probs

    NestedRouter.routing = routing
    NestedRouter._apply_seq_aux_loss = seq_aux_loss
