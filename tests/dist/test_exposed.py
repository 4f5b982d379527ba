"""What is counted as exposed communication, on clocks that are made up."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megatron_nsp.runtime import executor, exposed
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.executor import build_queue
from megatron_nsp.runtime.exposed import StreamTime

CPU = torch.device("cpu")
TOOK_MS, MEANWHILE_MS = 60.0, 40.0
PATIENCE_S = 60.0
"""How long one thread waits for another that a busy machine keeps."""


def exchange(group: object | None) -> Exchange:
    return Exchange(torch.zeros(4), (2, 2), (2, 2), group)  # type: ignore[arg-type]


class MadeUpHost:
    """A clock that moves only when told, and an exchange that ends when the clock says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.is_asked = threading.Event()
        self.ends_ms = 0.0
        monkeypatch.setattr(exposed, "time", SimpleNamespace(perf_counter=self.now_s))
        monkeypatch.setattr(executor, "run_exchange", self.run)

    def now_s(self) -> float:
        """The time; whoever asks for it begins to wait, or has waited."""
        now_s = self.now_ms / 1e3
        self.is_asked.set()
        return now_s

    def run(self, _: Exchange) -> torch.Tensor:
        """An exchange: it is over once compute waits for it, at its own time."""
        assert self.is_asked.wait(PATIENCE_S)
        self.now_ms = max(self.now_ms, self.ends_ms)
        return torch.zeros(4)


@pytest.mark.parametrize(
    ("overlap", "expected_ms"), [(False, TOOK_MS), (True, TOOK_MS - MEANWHILE_MS)]
)
def test_what_ran_beside_compute_is_not_exposed(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, expected_ms: float
) -> None:
    host = MadeUpHost(monkeypatch)
    queue = build_queue(CPU, overlap)
    host.ends_ms = TOOK_MS
    pending = queue.issue(exchange("a group"))
    host.now_ms += MEANWHILE_MS  # compute; a serial queue has finished the exchange before it
    pending.wait()
    assert queue.exposed.take_ms() == pytest.approx(expected_ms)
    assert queue.exposed.take_ms() == 0.0


def test_an_exchange_that_is_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    host = MadeUpHost(monkeypatch)
    host.is_asked.set()
    queue = build_queue(CPU, overlap=True)
    host.ends_ms = TOOK_MS
    pending = queue.issue(exchange("a group"))
    deadline_s = time.monotonic() + PATIENCE_S
    while host.now_ms < TOOK_MS and time.monotonic() < deadline_s:
        time.sleep(1e-3)
    pending.wait()
    assert host.now_ms == TOOK_MS
    assert queue.exposed.take_ms() == 0.0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exchange_of_a_rank_with_itself_counts_nothing(overlap: bool) -> None:
    queue = build_queue(CPU, overlap)
    queue.issue(exchange(None)).wait()
    assert queue.exposed.take_ms() == 0.0


def test_a_failed_exchange_was_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    host = MadeUpHost(monkeypatch)

    def fail(failing: Exchange) -> torch.Tensor:
        host.run(failing)
        raise RuntimeError("made up")

    monkeypatch.setattr(executor, "run_exchange", fail)
    queue = build_queue(CPU, overlap=True)
    host.ends_ms = TOOK_MS
    pending = queue.issue(exchange("a group"))
    with pytest.raises(RuntimeError, match="made up"):
        pending.wait()
    assert queue.exposed.take_ms() == pytest.approx(TOOK_MS)


class MadeUpStream:
    """Events of a stream that has run as far as `now_ms`."""

    def __init__(self) -> None:
        self.now_ms, self.next_ms = 0.0, 0.0

    def event(self, enable_timing: bool) -> "MadeUpEvent":
        assert enable_timing
        return MadeUpEvent(self)


class MadeUpEvent:
    def __init__(self, stream: MadeUpStream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.at_ms = self.stream.next_ms

    def query(self) -> bool:
        return self.at_ms <= self.stream.now_ms

    def elapsed_time(self, other: "MadeUpEvent") -> float:
        return other.at_ms - self.at_ms


def test_a_stream_counts_between_events_and_leaves_what_is_not_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = MadeUpStream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    exposed = StreamTime()
    for start_ms, stop_ms in ((0.0, 3.0), (10.0, 10.5), (20.0, 27.0)):
        stream.next_ms = start_ms
        with exposed.blocked():
            stream.next_ms = stop_ms
    stream.now_ms = 15.0
    assert exposed.take_ms() == 3.5
    assert exposed.take_ms() == 0.0
    stream.now_ms = 30.0
    assert exposed.take_ms() == 7.0
