"""Recorded plans: one JSON plan a line, written by a run and played back by another.

Playing plans back bypasses the planner: for repeating a run exactly, and for placements that no
planner would choose.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_nsp.arrays import IntArray
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree


class PlanRecorder:
    """Writes the plans of a run to a file, one line a step.

    A run that resumes keeps the lines of the steps before it and replaces those after.

    Args:
        path: the file; its folder must exist.

    Raises:
        ValueError: there is no such folder.
    """

    def __init__(self, path: str) -> None:
        """Touches nothing before the first plan."""
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise ValueError(f"--nsp-record-plans {path}: there is no folder {self._path.parent}")
        self._is_started = False

    def write(self, number: int, plan: Plan) -> None:
        """Writes the plan of step `number`, counted from 0."""
        if not self._is_started:
            before = self._path.read_text().splitlines()[:number] if self._path.is_file() else []
            self._path.write_text("".join(line + "\n" for line in before))
            self._is_started = True
        with self._path.open("a") as file:
            file.write(plan.to_json() + "\n")


def _read(path: str, number: int, line: str) -> Plan:
    try:
        return Plan.from_json(line)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--nsp-policy file:{path}: line {number} is not a plan: "
            f"{type(error).__name__}: {error}"
        ) from error


class PlanReplay:
    """Hands out the plans of a file, in order.

    Args:
        path: file of one JSON plan a line.
        tree: the job's tree.
        num_micro_batches: the job's micro-batches in a step.
        token_budget: the job's token budget.
        heads: query and key/value heads on a tensor-parallel rank; None = they split as they must.

    Raises:
        ValueError: there is no such file, or a plan is for another tree, number of micro-batches,
            budget or heads.
    """

    def __init__(
        self,
        path: str,
        tree: SPTree,
        num_micro_batches: int,
        token_budget: int | None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Reads the whole file."""
        if not Path(path).is_file():
            raise ValueError(f"--nsp-policy file:{path}: there is no such file")
        lines = Path(path).read_text().splitlines()
        self._plans = [_read(path, number, line) for number, line in enumerate(lines, 1) if line]
        for number, plan in enumerate(self._plans):
            for what, recorded, job in (
                ("the tree", plan.tree, tree),
                ("the micro-batches", plan.num_micro_batches, num_micro_batches),
            ):
                if recorded != job:
                    raise ValueError(
                        f"--nsp-policy file:{path}: plan {number} has {what} {recorded}, "
                        f"the job {job}"
                    )
            if plan.num_samples and len(plan.carried) == plan.num_samples:
                raise ValueError(
                    f"--nsp-policy file:{path}: plan {number} runs none of its {plan.num_samples} "
                    "samples"
                )
            if heads is not None:
                try:
                    plan.check_heads(*heads)
                except ValueError as error:
                    raise ValueError(f"--nsp-policy file:{path}: plan {number}: {error}") from error
            load = max((int(plan.token_load(m).max()) for m in range(num_micro_batches)), default=0)
            if token_budget is not None and load > token_budget:
                raise ValueError(
                    f"--nsp-policy file:{path}: plan {number} puts {load} tokens on a rank, over "
                    f"--nsp-token-budget {token_budget}"
                )
        self._path, self._next = path, self._numbered()

    def _numbered(self) -> Iterator[tuple[int, Plan]]:
        yield from enumerate(self._plans)

    def plan(self, lengths: IntArray) -> Plan:
        """The next recorded plan.

        Raises:
            ValueError: the file ends, or the plan is for other lengths.
        """
        number, plan = next(self._next, (len(self._plans), None))
        if plan is None:
            raise ValueError(f"--nsp-policy file:{self._path} ends after {number} plans")
        if not np.array_equal(plan.lengths, lengths):
            raise ValueError(
                f"--nsp-policy file:{self._path}: plan {number} is for {plan.num_samples} samples "
                f"of {int(plan.lengths.sum())} tokens, the batch has {len(lengths)} of "
                f"{int(lengths.sum())}"
            )
        return plan
