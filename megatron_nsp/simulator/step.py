"""A whole step on all ranks: layers, both passes, recomputation, sharded parameters, micro-batches.

    forward   for each layer:  attention, dense work (experts, MLP, projections)
    backward  for each layer, last first:  what is recomputed, dense work, attention

With sharded parameters (FSDP) each layer's are gathered by all ranks while the layer before runs,
and its gradients scattered while the next one does, on a queue of their own. Exchanges with experts
start when the last rank of the expert-parallel group arrives. Traffic of different kinds is taken
not to slow each other down.
"""

from dataclasses import dataclass

import numpy as np

from megatron_nsp.cost.cost_model import CostModel
from megatron_nsp.plan.arrays import FloatArray
from megatron_nsp.plan.order import ALL_ROOT_FIRST
from megatron_nsp.plan.phases import Pass
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import NOTHING_SAVED, SavedSamples
from megatron_nsp.simulator.active_paths import ActivePaths, active_paths
from megatron_nsp.simulator.attention import Clocks, run_attention
from megatron_nsp.simulator.dense import run_dense
from megatron_nsp.simulator.order_search import choose_orders, orders_of_trees


@dataclass(frozen=True)
class StepSettings:
    """How a step is executed; what backward runs again is the cost model's to say.

    Attributes:
        overlap: stream communication under compute.
        saved: samples whose attention is not recomputed.
        gather_us: time in which all ranks gather one layer's parameters; 0 = not sharded.
        scatter_us: time in which they scatter its gradients.
    """

    overlap: bool = True
    saved: SavedSamples = NOTHING_SAVED
    gather_us: float = 0.0
    scatter_us: float = 0.0


@dataclass(frozen=True, eq=False)
class Breakdown:
    """Where a step's time goes, `[P]` microseconds of each rank; they add up to `step_us`.

    Attributes:
        step_us: time of the step.
        attention_us: attention kernels.
        dense_us: projections, MLPs, experts and their exchanges.
        recompute_us: both of these once more in backward.
        exposed_us: sequence-parallel exchanges that nothing ran beside.
        waited_us: waiting for other ranks in exchanges, of experts too.
        sharding_us: waiting for parameters or for gradients to be scattered.
        bias_us: what the profile adds for every micro-batch.
        idle_us: waiting for the slowest rank at the end of the step.
    """

    step_us: float
    attention_us: FloatArray
    dense_us: FloatArray
    recompute_us: FloatArray
    exposed_us: FloatArray
    waited_us: FloatArray
    sharding_us: FloatArray
    bias_us: FloatArray
    idle_us: FloatArray

    def shares(self) -> dict[str, float]:
        """Mean over ranks of each part, as a share of the step."""
        parts = ("attention", "dense", "recompute", "exposed", "waited", "sharding", "bias", "idle")
        return {
            name: float(getattr(self, f"{name}_us").mean()) / max(self.step_us, 1e-12)
            for name in parts
        }


def simulate_plan(plan: Plan, cost: CostModel, settings: StepSettings | None = None) -> Breakdown:
    """Simulates one step.

    Args:
        plan: the plan.
        cost: the cost model, of the same tree.
        settings: how it is executed.
    """
    run = _Run(plan, cost, settings or StepSettings())
    for micro_batch in range(plan.num_micro_batches):
        run.micro_batch(micro_batch)
    return run.breakdown()


class _Run:
    """The clocks and sums of one simulation."""

    def __init__(self, plan: Plan, cost: CostModel, settings: StepSettings) -> None:
        self.plan, self.cost, self.settings = plan, cost, settings
        self.orders = choose_orders(plan, cost) if settings.overlap else ALL_ROOT_FIRST
        zeros = np.zeros(plan.tree.num_ranks)
        self.clocks = Clocks(zeros.copy(), zeros.copy())
        self.attention_us, self.dense_us, self.recompute_us = (zeros.copy() for _ in range(3))
        self.sharding_us, self.expert_wait_us, self.bias_us = (zeros.copy() for _ in range(3))
        self.sharding_free_us = 0.0

    def micro_batch(self, number: int) -> None:
        """Forward and backward of one micro-batch."""
        paths_of = {pass_: self._paths(self.plan, number, pass_) for pass_ in Pass}
        recomputed, saved = paths_of[Pass.FWD], self.settings.saved
        if saved.num_saved and self.cost.recompute != "none":
            recomputed = self._paths(saved.recomputed(self.plan), number, Pass.FWD)
        layers = self.cost.shape.num_layers
        num_recomputed = round(self.cost.recompute_share * layers)
        for pass_, paths in paths_of.items():
            gathered_us = self._start_gather()
            for layer in range(layers):
                self._wait_for_sharding(gathered_us)
                if layer + 1 < layers:
                    gathered_us = self._start_gather()
                if pass_ is Pass.FWD:
                    self._attention(paths, pass_)
                    self._dense(paths, pass_)
                else:
                    if layer >= layers - num_recomputed:  # the last ones of backward
                        self._recompute(paths, recomputed)
                    self._dense(paths, pass_)
                    self._attention(paths, pass_)
                    self._start_scatter()
        self.clocks.compute_us = self.clocks.compute_us + self.cost.profile.bias_us
        self.bias_us += self.cost.profile.bias_us
        self._wait_for_sharding(self.sharding_free_us)

    def _paths(self, plan: Plan, micro_batch: int, pass_: Pass) -> ActivePaths:
        orders = orders_of_trees(self.orders, plan, micro_batch, pass_)
        return active_paths(plan, micro_batch, self.cost, orders)

    def _attention(self, paths: ActivePaths, pass_: Pass) -> None:
        self.attention_us += run_attention(paths, pass_, self.clocks, self.settings.overlap)

    def _dense(self, paths: ActivePaths, pass_: Pass) -> None:
        self.dense_us += self._run_dense(paths, pass_)

    def _run_dense(self, paths: ActivePaths, pass_: Pass) -> FloatArray:
        busy_us, waited_us = run_dense(paths, pass_, self.clocks, self.cost)
        self.expert_wait_us += waited_us
        return busy_us

    def _recompute(self, paths: ActivePaths, recomputed: ActivePaths) -> None:
        if self.cost.recompute == "none":
            return
        busy_us = run_attention(recomputed, Pass.FWD, self.clocks, self.settings.overlap)
        if self.cost.recompute == "full":
            busy_us = busy_us + self._run_dense(paths, Pass.FWD)
        self.recompute_us += busy_us

    def _start_gather(self) -> float:
        """Gathers the next layer's parameters; returns when they are there."""
        return self._run_sharding(self.settings.gather_us)

    def _start_scatter(self) -> None:
        self._run_sharding(self.settings.scatter_us)

    def _run_sharding(self, took_us: float) -> float:
        if took_us > 0:
            started_us = max(float(self.clocks.compute_us.max()), self.sharding_free_us)
            self.sharding_free_us = started_us + took_us
        return self.sharding_free_us

    def _wait_for_sharding(self, until_us: float) -> None:
        idle_us = np.maximum(until_us - self.clocks.compute_us, 0.0)
        self.sharding_us += idle_us
        self.clocks.compute_us = self.clocks.compute_us + idle_us

    def breakdown(self) -> Breakdown:
        """The sums, once the last micro-batch has run."""
        step_us = float(self.clocks.compute_us.max())
        return Breakdown(
            step_us=step_us,
            attention_us=self.attention_us,
            dense_us=self.dense_us,
            recompute_us=self.recompute_us,
            exposed_us=self.clocks.exposed_us,
            waited_us=self.clocks.waited_us + self.expert_wait_us,
            sharding_us=self.sharding_us,
            bias_us=self.bias_us,
            idle_us=step_us - self.clocks.compute_us,
        )
