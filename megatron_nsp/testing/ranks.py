"""Runs a function on n local gloo ranks, forked from this process.

Forking starts eight ranks in about two seconds where spawning takes a minute. It needs one thread
in each child and a parent that has not touched CUDA. Ranks meet through a file, so no port is used.
"""

import contextlib
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

RankFunction = Callable[..., Any]


class RankError(RuntimeError):
    """A rank failed; the message is its traceback."""


def run_ranks(
    num_ranks: int, function: RankFunction, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Calls `function(rank, *args)` on every rank of a fresh gloo job.

    Args:
        num_ranks: ranks to start.
        function: what each rank runs, with `torch.distributed` initialised.
        *args: further arguments, shared through the fork.
        timeout_s: limit of every collective and, twice over, of the whole job.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: a rank raised, died or did not finish; the first failure ends the others.
    """
    if torch.cuda.is_initialized():
        raise RankError("ranks are forked, which a process that uses CUDA cannot do")
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="nsp-ranks-") as folder:
        pipes: list[tuple[Connection, Connection]] = []
        processes = []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe()
            arguments = (rank, num_ranks, f"{folder}/store", timeout_s, sender, function, args)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            _start(process)
            sender.close()
            pipes.append((receiver, sender))
            processes.append(process)
        try:
            return _collect([receiver for receiver, _ in pipes], 2 * timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _start(process: ForkProcess) -> None:
    """Forks a process without the warning that threads of this one are not in the child.

    torch and numpy have threads that wait for work. A child makes its own pool before anything else
    (`_rank_main`), and numpy's library does so at a fork by itself.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process.start()


def _collect(receivers: list[Connection], limit_s: float) -> list[Any]:
    results: list[Any] = [None] * len(receivers)
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    deadline = time.monotonic() + limit_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = sorted(waiting.values())
            raise RankError(f"ranks {ranks} did not finish within {limit_s:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                error, results[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if error is not None:
                raise RankError(f"rank {rank} failed:\n{error}")
    return results


def _rank_main(
    rank: int,
    num_ranks: int,
    store_path: str,
    timeout_s: float,
    sender: Connection,
    function: RankFunction,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # first: a forked child hangs in the parent's thread pool otherwise
    try:
        store = FileStore(store_path, num_ranks)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
        message: tuple[str | None, Any] = (None, function(rank, *args))
    except BaseException:
        message = (traceback.format_exc(), None)
    # Plain bytes: Connection.send would share tensors through this process, which is about to end.
    sender.send_bytes(pickle.dumps(message))
    # A rank that has nothing to exchange is done while others still connect to it: it stays until
    # all are heard, when it is killed, or until the process that asks is gone.
    with contextlib.suppress(EOFError, OSError):
        sender.recv_bytes()
    os._exit(0)  # skips the teardown of groups whose other ranks may be gone
