"""Training runs that write down where each rank's time goes, and what that adds up to.

`train` runs in every rank: Megatron's loop with the product's own trainer, kernel and queue, each
wrapped so that times are kept. `read_steps` takes the files of all ranks apart:

    compute   the rest of the step: kernels, dense work, packing, optimizer
    exposed   blocked on an exchange of attention whose members had all arrived
    waited    blocked until the last member arrived, or at the end of backward until the last rank

All ranks run on one machine, so their monotonic clocks are one.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[tuple[int, ...], int]
"""An exchange: the ranks of its group, and how many that group had in the step before it."""


@dataclass
class RankStep:
    """What one rank wrote down in one step; seconds of the machine's clock.

    Attributes:
        started: when it began.
        ended: when the next one did.
        synced: when its backward passes were over.
        exposed_ms: what the product itself measured.
        kernel_s: time in attention kernels.
        arrivals: when it began each exchange.
        waits: exchange, and from when to when compute was blocked on it.
    """

    started: float
    ended: float = 0.0
    synced: float = 0.0
    exposed_ms: float = 0.0
    kernel_s: float = 0.0
    arrivals: list[tuple[Key, float]] = field(default_factory=list)
    waits: list[tuple[Key, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """Where one rank's step went, milliseconds.

    Attributes:
        wall: the step.
        compute: busy.
        kernels: part of it in attention kernels.
        exposed: blocked on exchanges that were under way.
        waited: blocked on other ranks.
        product_exposed: what the product's own log says: exposed, and waited in exchanges.
    """

    wall: float
    compute: float
    kernels: float
    exposed: float
    waited: float
    product_exposed: float


def train(output: str, alternate: bool, flags: Sequence[str]) -> None:
    """One rank of a run; writes `output`/RANK.json at its end.

    Args:
        output: a folder.
        alternate: run every second step as `--no-nsp-overlap` does.
        flags: the command line.
    """
    sys.argv = ["pretrain_nsp.py", *flags]
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode()
    import torch
    import torch.distributed as dist
    from megatron.training import training

    from megatron_nsp.mcore import pretrain
    from megatron_nsp.runtime import executor
    from megatron_nsp.runtime.attention import AttentionRuntime

    steps: list[RankStep] = []
    key_of: dict[int, Key] = {}

    class Pending:
        def __init__(self, inner: Any, key: Key) -> None:
            self.inner, self.key = inner, key

        def wait(self) -> torch.Tensor:
            started = time.monotonic()
            received = self.inner.wait()
            steps[-1].waits.append((self.key, started, time.monotonic()))
            return received

    class Queue:
        def __init__(self, inner: Any) -> None:
            self.inner, self.count = inner, defaultdict(int)

        @property
        def exposed(self) -> Any:
            return self.inner.exposed

        def issue(self, exchange: Any) -> Any:
            if exchange.group is None:
                return self.inner.issue(exchange)
            ranks = tuple(dist.get_process_group_ranks(exchange.group))
            key = ranks, self.count[ranks]
            self.count[ranks] += 1
            key_of[id(exchange)] = key
            started = time.monotonic()
            pending = self.inner.issue(exchange)
            if isinstance(self.inner, executor.SerialQueue):
                steps[-1].waits.append((key, started, time.monotonic()))
                return pending
            return Pending(pending, key)

    run_exchange = executor.run_exchange

    def traced_exchange(exchange: Any) -> torch.Tensor:
        steps[-1].arrivals.append((key_of.pop(id(exchange)), time.monotonic()))
        return run_exchange(exchange)

    executor.run_exchange = traced_exchange

    class Kernel:
        def __init__(self, inner: Any) -> None:
            self.inner, self.name = inner, inner.name

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def _timed(self, work: Any, args: Any) -> Any:
            started = time.monotonic()
            result = work(*args)
            steps[-1].kernel_s += time.monotonic() - started
            return result

        def forward(self, *args: Any) -> Any:
            return self._timed(self.inner.forward, args)

        def backward(self, *args: Any) -> Any:
            return self._timed(self.inner.backward, args)

    finalize = training.finalize_model_grads

    def traced_finalize(*args: Any, **kwargs: Any) -> Any:
        steps[-1].synced = time.monotonic()
        return finalize(*args, **kwargs)

    training.finalize_model_grads = traced_finalize

    class TracedTrainer(pretrain.Trainer):
        def _open_runtime(self) -> None:
            super()._open_runtime()
            own = self.runtime
            serial = executor.build_queue(torch.device("cpu"), overlap=False)
            kernel = Kernel(own.kernel)
            self.runtimes = [
                AttentionRuntime(own.groups, kernel, Queue(queue)) for queue in (own.queue, serial)
            ]
            self.runtime = self.runtimes[0]

        def _start_step(self, step: Any) -> None:
            self._close_step()
            super()._start_step(step)
            if len(steps):
                steps[-1].exposed_ms = self.last_step.exposed_ms
            is_serial = alternate and step.number % 2 == 1
            self.runtime = self.runtimes[is_serial]
            for queue in self.runtimes:
                queue.queue.count.clear()
            for iterator in self._iterators:
                iterator._overlap = self.job.config.overlap and not is_serial
            steps.append(RankStep(time.monotonic()))

        def _close_step(self) -> None:
            if steps:
                steps[-1].ended = time.monotonic()

        def end(self) -> None:
            self._close_step()
            super().end()
            steps[-1].exposed_ms = self.last_step.exposed_ms
            text = json.dumps([asdict(step) for step in steps])
            Path(output, f"{dist.get_rank()}.json").write_text(text)

    pretrain.Trainer = TracedTrainer
    training.report_memory = lambda *args, **kwargs: None
    pretrain.main()


def read_steps(output: Path, num_ranks: int) -> list[list[Part]]:
    """By step and rank, where the time went."""
    ranks = [
        [RankStep(**step) for step in json.loads((output / f"{rank}.json").read_text())]
        for rank in range(num_ranks)
    ]
    return [_parts(step) for step in zip(*ranks, strict=True)]


def _parts(ranks: Sequence[RankStep]) -> list[Part]:
    last: dict[str, float] = {}
    for rank in ranks:
        for key, arrived in rank.arrivals:
            last[str(key)] = max(last.get(str(key), 0.0), arrived)
    all_synced, parts = max(rank.synced for rank in ranks), []
    for rank in ranks:
        exposed, waited = 0.0, all_synced - rank.synced
        for key, start, stop in rank.waits:
            complete = min(max(last[str(key)], start), stop)
            exposed += stop - complete
            waited += complete - start
        wall = rank.ended - rank.started
        parts.append(
            Part(
                wall=wall * 1e3,
                compute=(wall - exposed - waited) * 1e3,
                kernels=rank.kernel_s * 1e3,
                exposed=exposed * 1e3,
                waited=waited * 1e3,
                product_exposed=rank.exposed_ms,
            )
        )
    return parts
