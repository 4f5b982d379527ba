"""The backends, by name.

A new one is a file `backend_NAME.py` and an entry below, and the same in `runtime/backends`.
"""

from megatron_nsp.plan.backend import Backend, NodeHeads
from megatron_nsp.plan.backend_gather import Gather
from megatron_nsp.plan.backend_ring import Ring
from megatron_nsp.plan.backend_te import TeRing, TeUlysses

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Ring(), Gather(), TeRing(), TeUlysses())
}

OURS = tuple(name for name, backend in BACKENDS.items() if not backend.is_native)
NATIVE = tuple(name for name, backend in BACKENDS.items() if backend.is_native)

__all__ = [
    "BACKENDS",
    "NATIVE",
    "OURS",
    "Backend",
    "NodeHeads",
    "backend_choices",
    "backends_of",
]


def backend_choices() -> tuple[str, ...]:
    """What users may ask for: all names of all backends, behind 'auto'."""
    return ("auto", *(choice for backend in BACKENDS.values() for choice in backend.choices))


def backends_of(choice: str) -> tuple[Backend, ...]:
    """The backends that a node may have where users ask for this; all of them for 'auto'."""
    if choice == "auto":
        return tuple(BACKENDS.values())
    return tuple(backend for backend in BACKENDS.values() if choice in backend.choices)
