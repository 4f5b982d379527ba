"""What is counted as exposed communication, on clocks that are made up or barely real."""

import threading
import time

import pytest
import torch

from megatron_nsp.runtime import executor
from megatron_nsp.runtime.backends.base import Exchange
from megatron_nsp.runtime.executor import build_queue
from megatron_nsp.runtime.exposed import StreamTime

CPU = torch.device("cpu")
TOOK_MS, MEANWHILE_MS = 60.0, 40.0
SLACK_MS = 25.0


def exchange(group: object | None) -> Exchange:
    return Exchange(torch.zeros(4), (2, 2), (2, 2), group)  # type: ignore[arg-type]


def slow(_: Exchange) -> torch.Tensor:
    time.sleep(TOOK_MS / 1e3)
    return torch.zeros(4)


@pytest.mark.parametrize(
    ("overlap", "expected_ms"), [(False, TOOK_MS), (True, TOOK_MS - MEANWHILE_MS)]
)
def test_what_ran_beside_compute_is_not_exposed(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, expected_ms: float
) -> None:
    monkeypatch.setattr(executor, "run_exchange", slow)
    queue = build_queue(CPU, overlap)
    pending = queue.issue(exchange("a group"))
    time.sleep(MEANWHILE_MS / 1e3)
    pending.wait()
    assert expected_ms - SLACK_MS / 2 < queue.exposed.take_ms() < expected_ms + SLACK_MS
    assert queue.exposed.take_ms() == 0.0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exchange_of_a_rank_with_itself_counts_nothing(overlap: bool) -> None:
    queue = build_queue(CPU, overlap)
    queue.issue(exchange(None)).wait()
    assert queue.exposed.take_ms() == 0.0


def test_a_failed_exchange_was_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Exchange) -> torch.Tensor:
        released.wait()
        raise RuntimeError("made up")

    monkeypatch.setattr(executor, "run_exchange", fail)
    released, queue = threading.Event(), build_queue(CPU, overlap=True)
    pending = queue.issue(exchange("a group"))
    threading.Timer(TOOK_MS / 1e3, released.set).start()
    with pytest.raises(RuntimeError, match="made up"):
        pending.wait()
    assert queue.exposed.take_ms() > TOOK_MS / 2


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
