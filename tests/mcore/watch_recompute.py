"""What the probe writes down of recomputation: kernel calls, routing and what batches save.

Import it after CPU mode is on.
"""

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import RerunState, RerunStateMachine

from megatron_nsp.mcore import pretrain
from megatron_nsp.mcore.packed_seq_params import NestedSeqParams
from megatron_nsp.runtime.attention import NestedBatch
from megatron_nsp.runtime.kernels.cpu_flash import CpuFlashKernel
from tests.mcore import watch

KERNEL_CALLS: list[str] = watch.MORE.setdefault("kernel_calls", [])
SAVED: list[tuple[bool, int, int, int]] = watch.MORE.setdefault("saved", [])
ROUTES: list[tuple[int, bool, torch.Tensor]] = watch.MORE.setdefault("routes", [])
LIVE_BYTES: list[int] = watch.MORE.setdefault("live_bytes", [])
_BATCHES: list[NestedBatch] = []


def watch_recompute() -> None:
    """Puts all wrappers in place."""
    _watch_kernel()
    _watch_saved()
    _watch_router()


def _watch_kernel() -> None:
    forward, backward = CpuFlashKernel.forward, CpuFlashKernel.backward

    def watched_forward(self: CpuFlashKernel, *args: Any) -> Any:
        KERNEL_CALLS.append("fwd")
        return forward(self, *args)

    def watched_backward(self: CpuFlashKernel, *args: Any) -> Any:
        KERNEL_CALLS.append("bwd")
        return backward(self, *args)

    CpuFlashKernel.forward, CpuFlashKernel.backward = watched_forward, watched_backward


def saved_bytes(batch: NestedBatch) -> tuple[int, int]:
    """Bytes of the outputs and of the LSEs that a batch has saved, as they lie in memory."""
    saved = [output for layer in batch.saved_outputs.values() for output in layer.values()]
    return (
        sum(output.out_THV.untyped_storage().nbytes() for output in saved),
        sum(output.lse_hS.untyped_storage().nbytes() for output in saved),
    )


def _watch_saved() -> None:
    """Writes down what each micro-batch has saved after forward, and all in flight together."""
    forward, params_of = pretrain.Trainer.forward_step, NestedSeqParams.of

    def watched_params(*args: Any) -> NestedSeqParams:
        params = params_of(*args)
        assert params.nested is not None
        _BATCHES.append(params.nested)
        return params

    def watched(self: pretrain.Trainer, data_iterator: Any, model: Any) -> Any:
        result = forward(self, data_iterator, model)
        batch = _BATCHES[-1]
        SAVED.append((torch.is_grad_enabled(), batch.micro_batch, *saved_bytes(batch)))
        _BATCHES[:] = [each for each in _BATCHES if each.saved_outputs]
        LIVE_BYTES.append(sum(sum(saved_bytes(each)) for each in _BATCHES))
        return result

    NestedSeqParams.of = watched_params
    pretrain.Trainer.forward_step = watched


def _watch_router() -> None:
    """Saves each routing map, with its layer and whether gradients are on."""
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def watched(self: TopKRouter, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = forward(self, *args, **kwargs)
        ROUTES.append((self.layer_number, torch.is_grad_enabled(), routing_map.clone()))
        return probs, routing_map

    TopKRouter.forward = watched


def make_experts_tie() -> None:
    """Gives experts 0 and 1 the same logits."""
    from megatron.core.transformer.moe.router import TopKRouter

    gating = TopKRouter.gating

    def tied(self: TopKRouter, input: torch.Tensor) -> torch.Tensor:
        logits = gating(self, input)
        return torch.cat([logits[..., :1], logits[..., :1], logits[..., 2:]], dim=-1)

    TopKRouter.gating = tied


def run_every_step_twice() -> None:
    """Has Megatron's state machine repeat each step in place, on the batches of the first run."""
    should_run = RerunStateMachine.should_run_forward_backward

    def repeated(self: RerunStateMachine, data_iterator: Any) -> bool:
        # As if a result had looked wrong in the first run, and the second had settled it.
        self.rerun_requested |= self.state is RerunState.INITIAL_RUN
        self.continue_requested |= self.state is RerunState.RERUNNING_IN_PLACE
        return should_run(self, data_iterator)

    RerunStateMachine.should_run_forward_backward = repeated


def mark_otherwise(rank: int) -> None:
    """Makes one rank save one sample less than its plan says."""
    from megatron_nsp.mcore import planning
    from megatron_nsp.plan.saving import SavedSamples

    mark = planning.mark_saved

    def other(*args: Any) -> SavedSamples:
        saved = mark(*args)
        if rank != mpu.get_data_parallel_rank():
            return saved
        (key, count), *rest = saved.num_saved.items()
        return SavedSamples({key: count - 1, **dict(rest)}, saved.rank_bytes)

    planning.mark_saved = other
