"""One pass of one layer's attention on all ranks at once.

Every rank has a compute queue and a communication queue. Steps run in the order of the schedule; a
collective starts when its last member has reached it and has what it sends, and ends for all
members at the same time; an exchange between some ranks of a node is taken to be one of all. Arrays
have an entry a rank, so one step of all ranks is a few array operations.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_nsp.plan.arrays import BoolArray, FloatArray, IntArray
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.schedule import Step
from megatron_nsp.simulator.active_paths import ActivePaths


@dataclass(eq=False)
class Clocks:
    """When the queues of P ranks are free, and what the compute queues have waited for so far.

    Attributes:
        compute_us: `[P]` when each compute queue is free.
        communication_us: `[P]` when each communication queue is free.
        exposed_us: `[P]` compute idle while an exchange of the rank's own ran.
        waited_us: `[P]` compute idle while an exchange waited for other ranks.
    """

    compute_us: FloatArray
    communication_us: FloatArray
    exposed_us: FloatArray = field(init=False)
    waited_us: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has been waited for."""
        self.exposed_us = np.zeros_like(self.compute_us)
        self.waited_us = np.zeros_like(self.compute_us)

    def wait_until(self, ready_us: FloatArray, started_us: FloatArray) -> None:
        """Compute waits for exchanges that ran from `started_us` to `ready_us`."""
        idle_us = np.maximum(ready_us - self.compute_us, 0.0)
        exposed_us = np.minimum(idle_us, ready_us - started_us)
        self.exposed_us += exposed_us
        self.waited_us += idle_us - exposed_us
        self.compute_us = self.compute_us + idle_us


@dataclass(frozen=True, eq=False)
class Event:
    """One step of all ranks, for drawing: when it ran where, `[P]` each.

    Attributes:
        pass_: forward or backward.
        phase: the phase.
        degree: degree of each rank's node.
        is_on: whether the rank takes part.
        started_us: start.
        ended_us: end.
    """

    pass_: Pass
    phase: Phase
    degree: IntArray
    is_on: BoolArray
    started_us: FloatArray
    ended_us: FloatArray


@dataclass(frozen=True, eq=False)
class _Exchanges:
    """When an exchange of each rank started and ended, `[P]`."""

    started_us: FloatArray
    ended_us: FloatArray

    @classmethod
    def none(cls, num_ranks: int) -> "_Exchanges":
        """Nothing to wait for."""
        return cls(np.zeros(num_ranks), np.zeros(num_ranks))

    def updated(self, later: "_Exchanges", is_on: BoolArray) -> "_Exchanges":
        """With what came later on some ranks."""
        return _Exchanges(
            np.where(is_on, later.started_us, self.started_us),
            np.where(is_on, later.ended_us, self.ended_us),
        )


def run_attention(
    paths: ActivePaths,
    pass_: Pass,
    clocks: Clocks,
    overlap: bool,
    events: list[Event] | None = None,
) -> FloatArray:
    """Runs one pass of attention of one layer, moving the clocks.

    Args:
        paths: the active nodes.
        pass_: forward or backward.
        clocks: the ranks' clocks.
        overlap: stream the phases; otherwise finish a node before the next.
        events: gets an entry for every step that takes time.

    Returns:
        `[P]` time each compute queue was busy.
    """
    num_ranks = len(clocks.compute_us)
    busy_us = np.zeros_like(clocks.compute_us)
    received, returned = (
        [_Exchanges.none(num_ranks) for _ in range(paths.num_rows)] for _ in range(2)
    )
    on_its_way = np.full((paths.num_rows, num_ranks), -1)  # the round whose prologue was the last
    epilogues: list[tuple[_Exchanges, BoolArray]] = []
    for step, is_on in paths.order(pass_, overlap):
        row = step.node.depth
        if step.phase is Phase.NATIVE:
            for sent, was_on in epilogues:
                _wait_for(clocks, sent, was_on & is_on)
            ran, work_us = _native(paths, step, is_on, clocks)
            busy_us += work_us
        elif step.phase is Phase.COMPUTE:
            _wait_for(clocks, received[row], is_on & (on_its_way[row] == step.round))
            work_us = np.where(is_on, paths.step_us(step), 0.0)
            ran = _Exchanges(clocks.compute_us, clocks.compute_us + work_us)
            clocks.compute_us = ran.ended_us
            busy_us += work_us
        else:
            if step.phase is Phase.EPILOGUE:
                _wait_for(clocks, returned[row], is_on)
            elif step.phase is Phase.PROLOGUE and step.round:  # passes on what the last one brought
                _wait_for(clocks, received[row], is_on)
            ran = _exchange(paths, step, is_on, clocks)
            if step.phase is Phase.PROLOGUE:
                received[row] = received[row].updated(ran, is_on)
                on_its_way[row] = np.where(is_on, step.round, on_its_way[row])
            elif step.phase is Phase.RETURN:
                returned[row] = returned[row].updated(ran, is_on)
            else:
                epilogues.append((ran, is_on))
            if not overlap:
                _wait_for(clocks, ran, is_on)
        if events is not None:
            times = ran.started_us, ran.ended_us
            events.append(Event(pass_, step.phase, paths.degree[row], is_on, *times))
    for ran, is_on in epilogues:
        _wait_for(clocks, ran, is_on)
    return busy_us


def _exchange(paths: ActivePaths, step: Step, is_on: BoolArray, clocks: Clocks) -> _Exchanges:
    """Puts the exchanges of one row of nodes on the communication queues.

    They have what they send once compute has done what was issued before, and start when all ranks
    of the node are there, also those with which a rank exchanges nothing.
    """
    communicates = is_on & paths.communicates(step)
    arrived_us = np.maximum(clocks.compute_us, clocks.communication_us)
    latest_us = paths.sync(step.node.depth, arrived_us)
    started_us = np.where(communicates, latest_us, clocks.compute_us)
    ended_us = started_us + np.where(communicates, paths.step_us(step), 0.0)
    clocks.communication_us = np.where(communicates, ended_us, clocks.communication_us)
    return _Exchanges(started_us, ended_us)


def _native(
    paths: ActivePaths, step: Step, is_on: BoolArray, clocks: Clocks
) -> tuple[_Exchanges, FloatArray]:
    """Runs native nodes, once all of their ranks are there, and gives what of it is compute.

    Their rings hide what they can; what does not, keeps compute waiting.
    """
    latest_us = paths.sync(step.node.depth, clocks.compute_us)
    started_us = np.where(is_on, latest_us, clocks.compute_us)
    ended_us = started_us + np.where(is_on, paths.step_us(step), 0.0)
    work_us = np.where(is_on, paths.step_us(step._replace(phase=Phase.COMPUTE)), 0.0)
    clocks.wait_until(started_us, started_us)
    clocks.compute_us = clocks.compute_us + work_us
    clocks.wait_until(ended_us, started_us)
    clocks.communication_us = np.where(is_on, ended_us, clocks.communication_us)
    return _Exchanges(started_us, ended_us), work_us


def _wait_for(clocks: Clocks, exchange: _Exchanges, is_on: BoolArray) -> None:
    """Compute of the ranks that take part waits for an exchange."""
    ended_us = np.where(is_on, exchange.ended_us, clocks.compute_us)
    clocks.wait_until(ended_us, np.where(is_on, exchange.started_us, clocks.compute_us))
