"""One pass of one layer's attention on all ranks at once.

Every rank has a compute queue and a communication queue. Steps run in the order of the schedule; a
collective starts when its last member has reached it and has what it sends, and ends for all
members at the same time. Ranks are columns of arrays, so one step of all ranks is a few array
operations.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_nsp.plan import IntArray
from megatron_nsp.planner.score import FloatArray
from megatron_nsp.schedule import Pass, Phase, build_schedule
from megatron_nsp.simulator.network import ActivePaths, BoolArray
from megatron_nsp.tree import Node


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
class Exchange:
    """When an exchange of each rank started and ended, `[P]`."""

    started_us: FloatArray
    ended_us: FloatArray


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
    is_on = paths.is_active
    ready_us = clocks.compute_us  # what prologues send is there when the pass begins
    busy_us = np.zeros_like(clocks.compute_us)
    done: dict[int, FloatArray] = {}
    prologues: dict[int, Exchange] = {}
    epilogues: list[tuple[int, Exchange]] = []
    # Positions on the path stand for nodes: all ranks of a node have it at the same position.
    path = [Node(row, 0) for row in range(paths.num_rows)]
    for step in build_schedule(path, pass_, overlap):
        row = step.node.depth
        if step.phase is Phase.PROLOGUE:
            ran = _exchange(paths, pass_, step.phase, row, ready_us, is_on, clocks)
            prologues[row] = ran
        elif step.phase is Phase.COMPUTE:
            received = prologues[row]
            _wait_for(clocks, received, is_on[row])
            work_us = np.where(is_on[row], paths.phase_us[pass_, step.phase][row], 0.0)
            clocks.compute_us = clocks.compute_us + work_us
            busy_us += work_us
            done[row] = clocks.compute_us
            ran = Exchange(clocks.compute_us - work_us, clocks.compute_us)
        else:
            ran = _exchange(paths, pass_, step.phase, row, done[row], is_on, clocks)
            if overlap:
                epilogues.append((row, ran))
            else:
                _wait_for(clocks, ran, is_on[row])
        if events is not None:
            times = ran.started_us, ran.ended_us
            events.append(Event(pass_, step.phase, paths.degree[row], is_on[row], *times))
    for row, sent in epilogues:
        _wait_for(clocks, sent, is_on[row])
    return busy_us


def _exchange(
    paths: ActivePaths,
    pass_: Pass,
    phase: Phase,
    row: int,
    ready_us: FloatArray,
    is_on: BoolArray,
    clocks: Clocks,
) -> Exchange:
    """Puts the exchanges of one row of nodes on the communication queues."""
    communicates = is_on[row] & (paths.degree[row] > 1)
    arrived_us = np.maximum(ready_us, clocks.communication_us)
    started_us = np.where(communicates, paths.sync(row, arrived_us), ready_us)
    took_us = np.where(communicates, paths.phase_us[pass_, phase][row], 0.0)
    ended_us = started_us + took_us
    clocks.communication_us = np.where(communicates, ended_us, clocks.communication_us)
    return Exchange(started_us, ended_us)


def _wait_for(clocks: Clocks, exchange: Exchange, is_on: BoolArray) -> None:
    """Compute of the ranks that take part waits for an exchange."""
    ended_us = np.where(is_on, exchange.ended_us, clocks.compute_us)
    clocks.wait_until(ended_us, np.where(is_on, exchange.started_us, clocks.compute_us))
