"""Forks the ranks of training runs from a process that has imported everything already.

Importing torch and Megatron costs a rank more than a short run does. Reads one JSON job a line from
standard input and answers with the run's exit code. Ranks get the environment torchrun would give.
"""

import json
import os
import signal
import socket
import sys
import traceback


def run_rank(rank: int, job: dict, port: int) -> None:
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
        from tests.mcore import probe

        probe.main(job["argv"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(job: dict) -> int:
    """Runs one job; like torchrun it ends all ranks when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = set()
    for rank in range(job["num_ranks"]):
        child = os.fork()
        if child == 0:
            run_rank(rank, job, port)
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


def serve(float64: bool) -> None:
    """Imports what a rank needs, then runs jobs until standard input ends."""
    os.environ["LOCAL_WORLD_SIZE"] = "8"  # the most ranks of any job, asked for at import
    from megatron_nsp.mcore.cpu import enable_cpu_mode

    enable_cpu_mode(float64=float64)
    import torch

    torch.set_num_threads(1)
    from tests.mcore import watch  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(run(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    serve("--float64" in sys.argv)
