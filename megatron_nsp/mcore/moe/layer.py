"""How a router comes by the rows of its micro-batch.

Megatron hands its layers what a micro-batch carries (`packed_seq_params`) and its routers a mask of
padding alone. Here what is handed on as that mask is `RoutedRows`: from a transformer layer, which
takes it out of the parameters, to its experts and their router. Megatron's models are given no
mask: they cut it for sequence parallelism on the first pipeline stage only, and leave it out in
layers that are not recomputed beside some that are.
"""

import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import get_module
from torch import Tensor

from megatron_nsp.mcore.moe.router import NestedRouter
from megatron_nsp.mcore.moe.rows import RoutedRows


class NestedMoELayer(MoELayer):
    """Megatron's experts, which keep no micro-batch's rows.

    Several micro-batches are in flight in a pipeline, and what `--recompute-modules moe` runs again
    in a backward pass are functions of the module that forward ran on. So each forward pass runs on
    a shallow copy of the module: the same parameters, buffers and modules, and its own rows.
    """

    rows: RoutedRows | None = None

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the experts on the rows of a micro-batch.

        Args:
            hidden_states: `[T, 1, hidden]`.
            intermediate_tensors: None; those of CUDA graphs.
            padding_mask: the rows.
        """
        assert intermediate_tensors is None and isinstance(padding_mask, RoutedRows)
        of_rows = copy.copy(self)
        of_rows.rows = padding_mask
        return MoELayer.forward(of_rows, hidden_states)

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The experts of each row."""
        return self.router(hidden_states, self.rows)


@cache
def hands_on_rows(layer_class: type) -> type:
    """The class of transformer layers that hand the micro-batch's rows on to their experts."""

    def forward(self: Any, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        kwargs["padding_mask"] = packed_seq_params.rows
        return layer_class.forward(  # type: ignore[attr-defined]
            self, *args, packed_seq_params=packed_seq_params, **kwargs
        )

    return type(f"Nested{layer_class.__name__}", (layer_class,), {"forward": forward})


def exchange_experts(layer: Any) -> None:
    """Puts nested routing into a Megatron layer spec, if it has experts.

    Raises:
        ValueError: the spec has experts or a router of its own, which may count one rank's tokens.
    """
    experts: Any = getattr(getattr(layer, "submodules", None), "mlp", None)
    made, submodules = _class_and_submodules(experts)
    if not (isinstance(made, type) and issubclass(made, MoELayer)) or made is NestedMoELayer:
        return
    if made is not MoELayer or submodules.router is not TopKRouter:
        raise ValueError(
            f"--spec has experts of {made.__name__} with {submodules.router.__name__}: only "
            "Megatron's MoELayer with its TopKRouter counts the tokens of all ranks"
        )
    submodules = replace(submodules, router=NestedRouter)
    if isinstance(experts, partial):
        keywords = experts.keywords | {"submodules": submodules}
        layer.submodules.mlp = partial(NestedMoELayer, *experts.args, **keywords)
    else:
        layer.submodules.mlp = replace(experts, module=NestedMoELayer, submodules=submodules)
    layer.module = hands_on_rows(get_module(layer))


def _class_and_submodules(builder: Any) -> tuple[Any, Any]:
    """What a spec or a partial function makes, and of what."""
    if isinstance(builder, partial):
        return builder.func, builder.keywords.get("submodules")
    return getattr(builder, "module", builder), getattr(builder, "submodules", None)
