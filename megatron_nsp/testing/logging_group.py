"""A process group that writes down what passes through it, then hands it on.

It stands between `torch.distributed` and gloo, so it counts what is really called, from outside the
code under test.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, override

import torch.distributed as dist
from torch import Tensor


class Record(NamedTuple):
    """One all-to-all: the group's global ranks, the rows sent to each, bytes sent to others."""

    ranks: tuple[int, ...]
    send_rows: tuple[int, ...]
    recv_rows: tuple[int, ...]
    sent_bytes: int


@dataclass
class CollectiveLog:
    """The all-to-alls of one rank, in the order they were started."""

    records: list[Record] = field(default_factory=list)
    max_in_flight: int = 0
    _in_flight: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks."""
        return sum(record.sent_bytes for record in self.records)

    def start(self, record: Record) -> None:
        """Notes a collective that begins."""
        with self._lock:
            self.records.append(record)
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)

    def stop(self) -> None:
        """Notes that it ended."""
        with self._lock:
            self._in_flight -= 1

    def clear(self) -> None:
        """Forgets everything."""
        self.records.clear()
        self.max_in_flight = 0


class LoggingGroup(dist.ProcessGroup):
    """Logs the all-to-alls of one group.

    Args:
        inner: the group that does the work.
        log: where to write.
    """

    def __init__(self, inner: dist.ProcessGroup, log: CollectiveLog) -> None:
        """Takes rank and size from the inner group."""
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.log = inner, log
        self.global_ranks = tuple(dist.get_process_group_ranks(inner))

    @override
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        recv_rows: list[int],
        send_rows: list[int],
        options: Any = None,
    ) -> Any:
        row_bytes = input[0].numel() * input.element_size() if input.shape[0] else 0
        others = sum(send_rows) - (send_rows[self.rank()] if send_rows else 0)
        record = Record(self.global_ranks, tuple(send_rows), tuple(recv_rows), others * row_bytes)
        self.log.start(record)
        work = self.inner.alltoall_base(output, input, recv_rows, send_rows, options)
        return _LoggedWork(work, self.log)


class _LoggedWork(dist.Work):
    def __init__(self, work: dist.Work, log: CollectiveLog) -> None:
        super().__init__()
        self.work, self.log = work, log

    def wait(self, *args: Any) -> bool:
        done = bool(self.work.wait(*args))
        self.log.stop()
        return done


def logged_new_group(log: CollectiveLog) -> "_LoggedNewGroup":
    """A `new_group` for `NestedGroups.create` whose groups write to `log`."""
    return _LoggedNewGroup(log)


class _LoggedNewGroup:
    def __init__(self, log: CollectiveLog) -> None:
        self.log = log

    def __call__(self, ranks: list[int]) -> dist.ProcessGroup | None:
        group = dist.new_group(ranks)
        return LoggingGroup(group, self.log) if isinstance(group, dist.ProcessGroup) else None
