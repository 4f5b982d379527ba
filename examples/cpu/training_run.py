"""Runs a training recipe and reads its log while it runs.

Everything the ranks print goes to a log file. What a step was follows from two of its lines, ours
(`nsp step 3 | samples: 12 | ...`) and Megatron's (`... iteration 3/ 40 | ... | lm loss: ...`).
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

RECIPE = Path(__file__).resolve().parent / "train.sh"
TAIL_LINES = 40

_PLAN_LINE = re.compile(
    r"nsp step \d+ .*\| tokens: (\d+) .*\| imbalance: (\S+) \| tokens per degree: ([^|]+) \|"
)
_STEP_LINE = re.compile(
    r"iteration +(\d+)/.*elapsed time per iteration \(ms\): (\S+) .*lm loss: (\S+) "
)


class RunFailedError(Exception):
    """A run ended with an error; the message is the end of its log."""


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        number: from 1.
        loss: mean loss of its targets.
        tokens: tokens that ran.
        imbalance: predicted time of the busiest rank over the mean.
        degrees: share of the tokens at each degree, for example `1: 62%, 4: 38%`.
        wall_ms: how long it took.
        busiest_ms: CPU time of the rank that needed most.
    """

    number: int
    loss: float
    tokens: int
    imbalance: float
    degrees: str
    wall_ms: float
    busiest_ms: float


def train(log: Path, data: Path, *flags: str) -> Iterator[Step]:
    """Runs `train.sh` and yields its steps as they finish.

    Args:
        log: file for everything the run prints.
        data: prefix of the corpus.
        flags: more flags of the recipe.

    Raises:
        RunFailedError: the run failed.
    """
    with (
        log.open("w") as file,
        subprocess.Popen(
            ["bash", str(RECIPE), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHON": sys.executable, "DATA": str(data.resolve())},
        ) as process,
    ):
        try:
            yield from _read_steps(process, file)
        except BaseException:
            process.terminate()  # torchrun ends its ranks
            raise
    if process.returncode:
        tail = log.read_text().splitlines()[-TAIL_LINES:]
        raise RunFailedError("\n".join([*tail, f"the run failed; all it printed is in {log}"]))


def _read_steps(process: subprocess.Popen, file: Path) -> Iterator[Step]:
    plan, before_s = None, {}
    for line in process.stdout:
        file.write(line)
        if found := _PLAN_LINE.search(line):
            plan = found
            before_s = before_s or _cpu_seconds(process)
        if (found := _STEP_LINE.search(line)) and plan is not None:
            after_s = before_s | _cpu_seconds(process)  # a rank may have ended after the last step
            busiest_s = max(after_s[pid] - before_s[pid] for pid in before_s)
            before_s = after_s
            yield Step(
                number=int(found[1]),
                loss=float(found[3]),
                tokens=int(plan[1]),
                imbalance=float(plan[2]),
                degrees=plan[3],
                wall_ms=float(found[2]),
                busiest_ms=1e3 * busiest_s,
            )


def _cpu_seconds(launcher: subprocess.Popen) -> dict[int, float]:
    """CPU time of each rank so far, by process id."""
    seconds = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for rank in psutil.Process(launcher.pid).children():
            times = rank.cpu_times()
            seconds[rank.pid] = times.user + times.system
    return seconds
