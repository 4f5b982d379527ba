"""Checkpoints of Megatron's distributed optimizer over torch's own Adam.

Without Transformer Engine and Apex, on CPUs always, the inner optimizer is `torch.optim.AdamW`. The
fused ones count steps per parameter group, torch's per parameter, and Megatron 0.19.x trips over
that difference wherever a checkpoint is involved:

    1. A load asks a fresh optimizer for its step and stops with an assertion: it has none yet.
    2. A load gives all parameters one and the same step tensor: from then on the count grows by the
       number of parameters per step, and the bias correction is wrong.
    3. A load overwrites the step it has read from the checkpoint with the one of the fresh
       optimizer, or looks in vain for a step per parameter ("fully reshardable" checkpoints).
    4. A load writes into float32 shards, which are views of leaves, without turning autograd off.
    5. With Megatron-FSDP, a rank whose shard of a parameter is empty keeps no state for it. Saving
       and loading run one collective per tensor of state: ranks that list different ones hang.

Each can go when Megatron's own resume test runs with torch's Adam.
"""

from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor


def make_checkpoints_loadable() -> None:
    """Mends the five points above, where torch's Adam is in use; a second call does nothing."""
    optimizer_class = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or optimizer_class.state_dict.__module__ == __name__:
        return
    _mend_sharded_state(optimizer_class)
    _mend_fsdp_state(optimizer_class)


def _mend_sharded_state(optimizer_class: Any) -> None:
    """Points 1 to 4: Megatron's own sharding of the optimizer state."""
    original_state_dict = optimizer_class.state_dict
    original_load = optimizer_class.load_state_dict
    original_set = optimizer_class._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> dict[str, Any]:
        if self.init_state_fn is not None and len(self.optimizer.state) == 0:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return original_state_dict(self)

    def load_state_dict(self: Any, loaded: dict[str, Any]) -> None:
        with torch.no_grad():
            original_load(self, loaded)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    def set_states(self: Any, model_param: Tensor, tensors: dict[str, Any]) -> None:
        original_set(self, model_param, {**tensors, "step": None})  # passes over what is no tensor

    optimizer_class.state_dict = state_dict
    optimizer_class.load_state_dict = load_state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_states


def _mend_fsdp_state(optimizer_class: Any) -> None:
    """Point 5: state, of no elements, for parameters whose local shard is empty."""
    original_init = optimizer_class._init_optimizer_states_with_dummy_values
    original_sharded = optimizer_class.sharded_param_state_fsdp_dtensor

    def fill_gaps(inner: Any) -> None:
        if not isinstance(inner, torch.optim.Adam):  # AdamW is one, too
            return
        steps = [state["step"] for state in inner.state.values()]
        step = max(steps, default=torch.tensor(0.0))
        for group in inner.param_groups:
            for param in group["params"]:
                if not inner.state.get(param):
                    zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
                    inner.state[param] = {"step": step.clone(), **zeros}

    def init_states(self: Any) -> None:  # part of a load
        original_init(self)
        fill_gaps(self.optimizer)

    def sharded_state(self: Any, is_loading: bool = False) -> dict[str, Any]:
        if not is_loading:
            fill_gaps(self.optimizer)
        return original_sharded(self, is_loading)

    optimizer_class._init_optimizer_states_with_dummy_values = init_states
    optimizer_class.sharded_param_state_fsdp_dtensor = sharded_state
