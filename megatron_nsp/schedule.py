"""The issue order of a rank's work in one attention layer, as data.

A rank runs three phases for every active node on its path: prologue (communication), compute, and
epilogue (communication). `build_schedule` lists them in the order in which the host issues them.
Each queue runs its steps in that order; between queues only a node's own phases wait for one
another. The executor plays the list with kernels, the simulator with costs, and a pure test proves
from the lists alone that ranks which share collectives issue them in one order.

    serial     P0 C0 E0 P1 C1 E1 P2 C2 E2
    streamed   P0 P1 C0 E0 P2 C1 E1 C2 E2        communication queue: P0 P1 E0 P2 E1 E2

In the streamed order the prologue of the next node runs under the compute of this one, and its
epilogue under the next compute.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from megatron_nsp.tree import Node


class Pass(Enum):
    """Direction of a pass through the attention of a layer."""

    FWD = "fwd"
    BWD = "bwd"


class Phase(Enum):
    """One of the three phases of a node in a pass."""

    PROLOGUE = "prologue"
    COMPUTE = "compute"
    EPILOGUE = "epilogue"


class Queue(Enum):
    """Where a step runs."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Step(NamedTuple):
    """One phase of one node in one pass, on its queue."""

    pass_: Pass
    node: Node
    phase: Phase

    @property
    def queue(self) -> Queue:
        """The queue that runs the phase."""
        return Queue.COMPUTE if self.phase is Phase.COMPUTE else Queue.COMMUNICATION


def build_schedule(path: Sequence[Node], pass_: Pass, overlap: bool) -> tuple[Step, ...]:
    """The steps of one rank in one pass of one layer, in issue order.

    Args:
        path: the rank's active nodes, root first.
        pass_: forward or backward.
        overlap: stream the phases of consecutive nodes; otherwise finish a node before the next.
    """
    steps: list[Step] = []
    if overlap and path:
        steps.append(Step(pass_, path[0], Phase.PROLOGUE))
    for place, node in enumerate(path):
        if not overlap:
            steps.append(Step(pass_, node, Phase.PROLOGUE))
        elif place + 1 < len(path):
            steps.append(Step(pass_, path[place + 1], Phase.PROLOGUE))
        steps.append(Step(pass_, node, Phase.COMPUTE))
        steps.append(Step(pass_, node, Phase.EPILOGUE))
    return tuple(steps)


def collectives(steps: Sequence[Step], degree_of: dict[Node, int]) -> tuple[Step, ...]:
    """The steps that put a collective on the network, in issue order.

    A node of one rank exchanges with itself alone and sends nothing.
    """
    return tuple(
        step for step in steps if step.queue is Queue.COMMUNICATION and degree_of[step.node] > 1
    )
