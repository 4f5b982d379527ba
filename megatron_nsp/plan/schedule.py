"""The issue order of a rank's work in one attention layer, as data.

A rank runs for every active node on its path: prologue (communication), compute, and epilogue
(communication). `build_schedule` lists these phases in the order in which the host issues them.
Each queue runs its steps in that order; between queues only a node's own phases wait for one
another. The executor plays the list with kernels, the simulator with costs, and a pure test proves
from the lists alone that ranks which share collectives issue them in one order.

    serial     P0 C0 E0 P1 C1 E1 P2 C2 E2
    streamed   P0 P1 C0 E0 P2 C1 E1 C2 E2        communication queue: P0 P1 E0 P2 E1 E2

In the streamed order the prologue of the next node runs under the compute of this one, and its
epilogue under the next compute.

A node whose keys and values travel between ring members has several rounds, each with a prologue
that brings the next keys and a compute phase; in backward each round after the first returns
gradients (R) to where its keys came from, and the epilogue waits for what others return:

    forward    P0.0 P0.1 C0.0 P0.2 C0.1 P1 C0.2 E0 C1 E1
    backward   P0.0 P0.1 C0.0 P0.2 C0.1 R0.1 P1 C0.2 R0.2 E0 C1 E1

That wait could hide under C1. But then members would meet once more after C1, which takes some of
them much longer than others, and those that are done would wait in every layer.

A node that Transformer Engine runs itself is one native step (N), which computes and communicates
and of which we see neither start nor end of an exchange. A rank has one exchange in flight at a
time, so nothing of ours may be on its way then: what was issued before is waited for first, and the
next prologue is issued behind it.

    node 1 is native    P0 C0 E0 N1 P2 P3 C2 E2 C3 E3
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from megatron_nsp.plan.split import ULYSSES, Split
from megatron_nsp.plan.tree import Node


class Pass(Enum):
    """Direction of a pass through the attention of a layer."""

    FWD = "fwd"
    BWD = "bwd"


class Phase(Enum):
    """One of the phases of a node in a pass."""

    PROLOGUE = "prologue"
    COMPUTE = "compute"
    RETURN = "return"
    EPILOGUE = "epilogue"
    NATIVE = "native"


class Queue(Enum):
    """Where a step runs."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Step(NamedTuple):
    """One phase of one node in one pass, on its queue."""

    pass_: Pass
    node: Node
    phase: Phase
    round: int = 0

    @property
    def queue(self) -> Queue:
        """The queue that runs the phase; a native one has the communication queue empty."""
        is_compute = self.phase in (Phase.COMPUTE, Phase.NATIVE)
        return Queue.COMPUTE if is_compute else Queue.COMMUNICATION


def num_rounds(split: Split) -> int:
    """Compute phases of a node: one for each ring member, two where keys are gathered at once."""
    if split.is_native:
        return 1
    if split.outer == "gather":
        return min(split.ring_degree, 2)
    return split.ring_degree


def build_schedule(
    path: Sequence[Node],
    pass_: Pass,
    overlap: bool,
    splits: Mapping[Node, Split] | None = None,
) -> tuple[Step, ...]:
    """The steps of one rank in one pass of one layer, in issue order.

    Args:
        path: the rank's active nodes, in the order in which they run; the same for all ranks of a
            tree, so a function of the depths alone.
        pass_: forward or backward.
        overlap: stream the phases of consecutive nodes; otherwise finish a node before the next.
        splits: how nodes divide attention; a node that is not there: Ulysses.
    """
    rounds = [(node, r) for node in path for r in range(num_rounds(_split(node, splits)))]
    steps: list[Step] = []
    num_issued = 0  # rounds whose prologue is in the list
    for place, (node, number) in enumerate(rounds):
        if _split(node, splits).is_native:
            steps.append(Step(pass_, node, Phase.NATIVE))
            num_issued = place + 1
            continue
        for following, its_number in rounds[num_issued : place + (2 if overlap else 1)]:
            if _split(following, splits).is_native:
                break
            steps.append(Step(pass_, following, Phase.PROLOGUE, its_number))
            num_issued += 1
        steps.append(Step(pass_, node, Phase.COMPUTE, number))
        if pass_ is Pass.BWD and number:
            steps.append(Step(pass_, node, Phase.RETURN, number))
        if number == num_rounds(_split(node, splits)) - 1:
            steps.append(Step(pass_, node, Phase.EPILOGUE))
    return tuple(steps)


def _split(node: Node, splits: Mapping[Node, Split] | None) -> Split:
    return splits.get(node, ULYSSES) if splits else ULYSSES


def communicates(step: Step, degree: int, split: Split = ULYSSES) -> bool:
    """Whether a step puts a collective on the network.

    First prologues and epilogues are among the ranks of a ring member, the rest between members; an
    exchange of a rank with itself alone sends nothing. A native step counts as one collective.

    Args:
        step: the step.
        degree: ranks of its node.
        split: how they divide attention.
    """
    if step.phase is Phase.NATIVE:
        return degree > 1
    if step.queue is Queue.COMPUTE:
        return False
    is_inside = step.phase is Phase.EPILOGUE or step.round == 0
    return (degree // split.ring_degree if is_inside else split.ring_degree) > 1


def collectives(
    steps: Sequence[Step],
    degree_of: Mapping[Node, int],
    splits: Mapping[Node, Split] | None = None,
) -> tuple[Step, ...]:
    """The steps that put a collective on the network, in issue order."""
    splits = splits or {}
    return tuple(
        step
        for step in steps
        if communicates(step, degree_of[step.node], splits.get(step.node, ULYSSES))
    )
