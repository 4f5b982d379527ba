"""Forks the ranks of training runs from a process that has imported everything already.

    python -m tests.mcore.fork_server PROGRAM [--float64]

Importing torch and Megatron costs a rank more than a short run does. The program is a module of
this folder, its `main` gets the job's arguments. Reads one JSON job a line from standard input and
answers with the run's exit code. Ranks get the environment torchrun would give.
"""

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module

import pytest

from tests.mcore.help_texts import read_help_texts_once

Program = Callable[[list[str]], None]

BEFOREHAND = {
    "plain": ("tests.mcore.plain",),
    "probe": (
        "tests.mcore.watch_experts",
        "tests.mcore.watch_recompute",
        # what a run imports when it first needs it
        "megatron.core.models.mimo",
        "megatron.core.tokenizers.text.text_tokenizer",
        "megatron_nsp.runtime.kernels.cpu_flash",
        "numpy.ma",
        "torch.utils.serialization",
    ),
}
"""What is imported before a fork, by program: modules alone, nothing has run in them."""


def run_rank(program: Program, rank: int, job: dict, port: int) -> None:
    """Becomes one rank: never returns."""
    code = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        size = str(job["num_ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
        os.environ |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        program(job["argv"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(program: Program, job: dict) -> int:
    """Runs one job; like torchrun it ends all ranks when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = set()
    for rank in range(job["num_ranks"]):
        child = os.fork()
        if child == 0:
            run_rank(program, rank, job, port)
        ranks.add(child)
    failed = 0
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status) or 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def serve(program: str, float64: bool) -> None:
    """Imports what a rank needs, then runs jobs until standard input ends."""
    os.environ["LOCAL_WORLD_SIZE"] = "8"  # the most ranks of any job, asked for at import
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode(float64=float64)
    import torch

    torch.set_num_threads(1)
    for module in BEFOREHAND[program]:
        import_module(module)
    read_help_texts_once(pytest.MonkeyPatch())
    main = import_module(f"tests.mcore.{program}").main
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(run(main, json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], "--float64" in sys.argv)
