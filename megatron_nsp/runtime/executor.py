"""Plays a schedule: hands exchanges to a communication queue and runs compute in issue order.

The executor decides nothing: order comes from `schedule.build_schedule`, the work of a step from a
`NodePass`. A queue runs its exchanges one at a time, in the order of issue, and leaves the sent
tensor alone until the exchange is waited for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.phases import Phase
from megatron_nsp.plan.schedule import Step
from megatron_nsp.plan.tree import Node
from megatron_nsp.runtime.backends.base import Exchange, NodePass
from megatron_nsp.runtime.exposed import ExposedTime, HostTime, StreamTime, exposed_time


class Pending(Protocol):
    """An exchange on its way."""

    def wait(self) -> Tensor:
        """What was received, `[sum(recv_counts)]`; raises what the exchange raised."""
        ...


class CommunicationQueue(Protocol):
    """Runs exchanges in issue order, one at a time.

    Attributes:
        exposed: how long compute was blocked on them.
    """

    exposed: ExposedTime

    def issue(self, exchange: Exchange) -> Pending:
        """Puts an exchange on the queue."""
        ...


def run_exchange(exchange: Exchange) -> Tensor:
    """Runs one exchange to its end on the calling thread and stream."""
    if exchange.group is None:
        return exchange.send
    received = exchange.send.new_empty(sum(exchange.recv_counts))
    dist.all_to_all_single(
        received,
        exchange.send,
        list(exchange.recv_counts),
        list(exchange.send_counts),
        group=exchange.group,
    )
    return received


class _Done:
    def __init__(self, received: Tensor) -> None:
        self.received = received

    def wait(self) -> Tensor:
        return self.received


class SerialQueue:
    """Runs every exchange when it is issued: `--no-nsp-overlap`.

    Args:
        exposed: measures the exchanges, all of which compute waits for.
    """

    def __init__(self, exposed: ExposedTime) -> None:
        """Measures with `exposed`."""
        self.exposed = exposed

    def issue(self, exchange: Exchange) -> Pending:
        """Runs the exchange."""
        if exchange.group is None:
            return _Done(exchange.send)
        with self.exposed.blocked():
            return _Done(run_exchange(exchange))


class _OnThread:
    def __init__(self, exchange: Exchange, exposed: ExposedTime) -> None:
        self.exchange, self.exposed = exchange, exposed
        self.finished = Event()
        self.received: Tensor | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.received = run_exchange(self.exchange)
        except BaseException as error:
            self.error = error
        self.finished.set()

    def wait(self) -> Tensor:
        with self.exposed.blocked():
            self.finished.wait()
        if self.error is not None:
            raise self.error
        assert self.received is not None
        return self.received


class ThreadQueue:
    """One thread that runs the exchanges of CPU tensors, so that compute goes on beside them.

    The thread is a daemon: a job that fails elsewhere does not wait for an exchange to time out.
    """

    def __init__(self) -> None:
        """Starts no thread before the first exchange that communicates."""
        self.exposed: ExposedTime = HostTime()
        self._work: SimpleQueue[_OnThread] = SimpleQueue()
        self._thread: Thread | None = None

    def issue(self, exchange: Exchange) -> Pending:
        """Queues the exchange; one within a single rank is done at once."""
        if exchange.group is None:
            return _Done(exchange.send)
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="nsp-communication", daemon=True)
            self._thread.start()
        pending = _OnThread(exchange, self.exposed)
        self._work.put(pending)
        return pending

    def _serve(self) -> None:
        while True:
            self._work.get().run()


class _OnStream:
    def __init__(
        self,
        exchange: Exchange,
        received: Tensor,
        finished: torch.cuda.Event,
        exposed: ExposedTime,
    ) -> None:
        self.exchange, self.received, self.finished = exchange, received, finished
        self.exposed = exposed

    def wait(self) -> Tensor:
        compute = torch.cuda.current_stream()
        with self.exposed.blocked():
            compute.wait_event(self.finished)
        self.received.record_stream(compute)
        return self.received


class StreamQueue:
    """A side stream for the exchanges of CUDA tensors.

    A stream runs its work in order, so one exchange is in flight at a time. Tensors that cross
    streams are recorded on the stream that reads them, else their memory could be reused too early.
    """

    def __init__(self) -> None:
        """Makes the side stream on the current device."""
        self._stream = torch.cuda.Stream()
        self.exposed: ExposedTime = StreamTime()

    def issue(self, exchange: Exchange) -> Pending:
        """Queues the exchange behind the work that produced what it sends."""
        if exchange.group is None:
            return _Done(exchange.send)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            received = run_exchange(exchange)
            finished = torch.cuda.Event()
            finished.record(self._stream)
        exchange.send.record_stream(self._stream)
        return _OnStream(exchange, received, finished, self.exposed)


def build_queue(device: torch.device, overlap: bool) -> CommunicationQueue:
    """The queue of a rank: serial, or the streamed one of the device."""
    if not overlap:
        return SerialQueue(exposed_time(device))
    return StreamQueue() if device.type == "cuda" else ThreadQueue()


class NodeError(RuntimeError):
    """A step of a schedule failed; the cause is the exception it was raised from.

    Attributes:
        samples: the samples of the node, numbered as in the plan.
    """

    def __init__(self, step: Step, part: NodeSlice, cause: Exception) -> None:
        """Names the step and the cause."""
        place = f"{step.pass_.value} {step.phase.value} of node {part.degree}:{step.node.index}"
        super().__init__(f"{place}: {type(cause).__name__}: {cause}")
        self.samples: list[int] = part.samples.tolist()


def play(steps: Sequence[Step], passes: Mapping[Node, NodePass], queue: CommunicationQueue) -> None:
    """Runs one pass of one layer.

    Args:
        steps: the rank's steps, in issue order.
        passes: the work of each node on the rank's active path.
        queue: the rank's communication queue.

    Raises:
        NodeError: a step raised.
    """
    playing = _Playing(passes, queue)
    for step in steps:
        if step.phase is Phase.NATIVE:
            playing.finish_all()
        with _named(step, passes[step.node]):
            playing.run(step)
    playing.finish_all()


class _Playing:
    """What is on its way while a schedule is played."""

    def __init__(self, passes: Mapping[Node, NodePass], queue: CommunicationQueue) -> None:
        self.passes, self.queue = passes, queue
        self.prologues: dict[Node, tuple[int, Pending]] = {}
        self.returns: dict[Node, list[tuple[int, Pending]]] = {}
        self.epilogues: list[tuple[Step, Pending]] = []

    def run(self, step: Step) -> None:
        node, work = step.node, self.passes[step.node]
        if step.phase is Phase.PROLOGUE:
            self.receive(node)  # a later round passes on what this one needs
            self.prologues[node] = step.round, self.queue.issue(work.prologue(step.round))
        elif step.phase is Phase.COMPUTE:
            if self.prologues.get(node, (-1,))[0] == step.round:
                self.receive(node)
            work.compute(step.round)
        elif step.phase is Phase.NATIVE:
            assert not self.prologues and not self.returns, f"{step} with exchanges on their way"
            work.compute(step.round)
        elif step.phase is Phase.RETURN:
            pending = self.queue.issue(work.give_back(step.round))
            self.returns.setdefault(node, []).append((step.round, pending))
        else:
            for number, pending in self.returns.pop(node, []):
                work.take_back(number, pending.wait())
            self.epilogues.append((step, self.queue.issue(work.epilogue())))

    def finish_all(self) -> None:
        """Waits for the epilogues that are on their way."""
        for step, pending in self.epilogues:
            with _named(step, self.passes[step.node]):
                self.passes[step.node].finish(pending.wait())
        self.epilogues.clear()

    def receive(self, node: Node) -> None:
        if node in self.prologues:
            number, pending = self.prologues.pop(node)
            self.passes[node].receive(number, pending.wait())


@contextmanager
def _named(step: Step, work: NodePass) -> Iterator[None]:
    """Names the step in what it raises."""
    try:
        yield
    except Exception as error:
        raise NodeError(step, work.call.part, error) from error
