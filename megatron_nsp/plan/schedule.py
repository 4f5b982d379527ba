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
from typing import NamedTuple

from megatron_nsp.plan.phases import Pass, Phase, Queue
from megatron_nsp.plan.split import ULYSSES, Split
from megatron_nsp.plan.tree import Node


class Step(NamedTuple):
    """One phase of one node in one pass, on its queue."""

    pass_: Pass
    node: Node
    phase: Phase
    round: int = 0

    @property
    def queue(self) -> Queue:
        """The queue that runs the step."""
        return self.phase.queue

    @property
    def is_between_members(self) -> bool:
        """Whether the step meets other ring members, rather than the ranks of its own."""
        return self.phase.is_between_members(self.round)


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
    split_of = {node: (splits or {}).get(node, ULYSSES) for node in path}
    rounds = [
        (node, number, split.phases(pass_, number))
        for node, split in split_of.items()
        for number in range(split.num_rounds)
    ]
    steps: list[Step] = []
    num_issued = 0  # rounds whose prologue is in the list
    for place, (node, number, phases) in enumerate(rounds):
        for following, its_number, its_phases in rounds[num_issued : place + (2 if overlap else 1)]:
            if Phase.PROLOGUE not in its_phases:
                break
            steps.append(Step(pass_, following, Phase.PROLOGUE, its_number))
            num_issued += 1
        num_issued = max(num_issued, place + 1)
        for phase in phases:
            if phase is not Phase.PROLOGUE:
                # There is one epilogue, whatever round it comes after.
                steps.append(Step(pass_, node, phase, 0 if phase is Phase.EPILOGUE else number))
    return tuple(steps)


def communicates(step: Step, degree: int, split: Split = ULYSSES) -> bool:
    """Whether a step puts a collective on the network.

    An exchange of a rank with itself alone sends nothing. A native step counts as one collective.

    Args:
        step: the step.
        degree: ranks of its node.
        split: how they divide attention.
    """
    if step.phase is Phase.COMPUTE:
        return False
    return (split.num_members if step.is_between_members else degree // split.num_members) > 1


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
