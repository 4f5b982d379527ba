"""Exposed communication: for how long compute was blocked on exchanges.

A queue measures it around every place where compute waits for an exchange. What ran beside compute
counts nothing; waiting for the other members of an exchange counts as well, since compute cannot
tell it from a slow network.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, override

import torch


class ExposedTime(Protocol):
    """Adds up the time for which compute was blocked."""

    def blocked(self) -> AbstractContextManager[None]:
        """Counts the time from entering to leaving."""
        ...

    def take_ms(self) -> float:
        """Milliseconds since it was last asked."""
        ...


class HostTime(ExposedTime):
    """Time of the host, for tensors whose compute runs on the host too."""

    def __init__(self) -> None:
        """Starts at 0."""
        self._total_s = 0.0

    @override
    @contextmanager
    def blocked(self) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._total_s += time.perf_counter() - started_s

    @override
    def take_ms(self) -> float:
        total_ms, self._total_s = self._total_s * 1e3, 0.0
        return total_ms


class StreamTime(ExposedTime):
    """Time of the compute stream, between two events around what it waits for.

    The host never waits for an event: what is not over when asked counts the next time.
    """

    def __init__(self) -> None:
        """Starts at 0."""
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @override
    @contextmanager
    def blocked(self) -> Iterator[None]:
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        yield
        after.record()
        self._pairs.append((before, after))

    @override
    def take_ms(self) -> float:
        total_ms = 0.0
        while self._pairs and self._pairs[0][1].query():
            before, after = self._pairs.popleft()
            total_ms += before.elapsed_time(after)
        return total_ms


def exposed_time(device: torch.device) -> ExposedTime:
    """What measures on a device."""
    return StreamTime() if device.type == "cuda" else HostTime()
