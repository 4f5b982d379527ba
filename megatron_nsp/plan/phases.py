"""The phases of a node in one pass through attention, and where they run."""

from enum import Enum


class Pass(Enum):
    """Direction of a pass through the attention of a layer."""

    FWD = "fwd"
    BWD = "bwd"


class Queue(Enum):
    """Where a step runs."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Phase(Enum):
    """One of the phases of a node in a pass."""

    PROLOGUE = "prologue"
    COMPUTE = "compute"
    RETURN = "return"
    EPILOGUE = "epilogue"
    NATIVE = "native"

    @property
    def queue(self) -> Queue:
        """The queue that runs the phase; a native one has the communication queue empty."""
        is_compute = self in (Phase.COMPUTE, Phase.NATIVE)
        return Queue.COMPUTE if is_compute else Queue.COMMUNICATION

    def is_between_members(self, number: int) -> bool:
        """Whether the phase of a round meets other ring members, rather than the ranks of its own.

        First prologues and epilogues exchange tokens for heads inside a member; all that follows a
        first prologue moves keys, or their gradients, between members.
        """
        return self in (Phase.RETURN, Phase.NATIVE) or (self is Phase.PROLOGUE and number > 0)
