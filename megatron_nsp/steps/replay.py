"""Recorded plans: one JSON plan a line, with its step, written by a run and played back by another.

Playing plans back bypasses the planner: for repeating a run exactly, and for placements that no
planner would choose. A line without a step follows the line before it; the first is step 0.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.steps.sampler import StepSizes

_NOTHING_CARRIED: IntArray = np.zeros(0, dtype=np.int64)


class PlanRecorder:
    """Writes the plans of a run to a file, one line a step.

    A run that resumes keeps the lines of the steps before it and replaces those after. A file that
    it begins holds no plans of the steps before it.

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
            self._path.write_text("".join(line + "\n" for line in self._lines_before(number)))
            self._is_started = True
        with self._path.open("a") as file:
            file.write(json.dumps({"step": number} | plan.to_dict()) + "\n")

    def _lines_before(self, number: int) -> list[str]:
        """What the file holds of the steps before `number`."""
        kept: list[str] = []
        step = -1
        for line in self._path.read_text().splitlines() if self._path.is_file() else ():
            step = _step_of(line, step + 1)
            if step >= number:
                break
            kept.append(line)
        return kept


def _step_of(line: str, following: int) -> int:
    """The step that a line of any file says it is of, or the one that follows the line before."""
    try:
        data = json.loads(line)
    except ValueError:
        return following
    return int(data.get("step", following)) if isinstance(data, dict) else following


def _read(path: str) -> dict[int, Plan]:
    """The plans of a file by step."""
    plans: dict[int, Plan] = {}
    last = -1
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line:
            continue
        where = f"--nsp-policy file:{path}: line {number}"
        try:
            data: dict[str, Any] = json.loads(line)
            plan, step = Plan.from_dict(data), int(data.get("step", last + 1))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where} is not a plan: {type(error).__name__}: {error}") from error
        if step <= last:
            raise ValueError(f"{where} is of step {step}, the line before it of step {last}")
        plans[step], last = plan, step
    return plans


class PlanReplay:
    """Hands out the plans of a file, step after step.

    Args:
        path: file of one JSON plan a line.
        tree: the job's tree.
        size_of: the size of each step of the job.
        token_budget: the job's token budget.
        heads: query and key/value heads on a tensor-parallel rank; None = they split as they must.

    Raises:
        ValueError: there is no such file, a line is no plan or out of order, or a plan is for
            another tree, number of micro-batches, budget or heads.
    """

    def __init__(
        self,
        path: str,
        tree: SPTree,
        size_of: StepSizes,
        token_budget: int | None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Reads the whole file."""
        if not Path(path).is_file():
            raise ValueError(f"--nsp-policy file:{path}: there is no such file")
        self._path, self._plans = path, _read(path)
        for number, plan in self._plans.items():
            num_micro_batches = size_of(number).num_micro_batches
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
        self._next = 0

    def plan(self, lengths: IntArray) -> Plan:
        """The recorded plan of the next step; the first is step 0.

        Raises:
            ValueError: the file holds no plan of that step, or one for other lengths.
        """
        number = self._next
        plan = self._plans.get(number)
        if plan is None:
            raise ValueError(f"--nsp-policy file:{self._path} {self._missing(number)}")
        if not np.array_equal(plan.lengths, lengths):
            raise ValueError(
                f"--nsp-policy file:{self._path}: plan {number} is for {plan.num_samples} samples "
                f"of {int(plan.lengths.sum())} tokens, the batch has {len(lengths)} of "
                f"{int(lengths.sum())}"
            )
        self._next += 1
        return plan

    def carried(self, lengths: IntArray) -> IntArray:
        """Samples that the next step carries over, for a run that resumes after it.

        A file that a resumed run began says nothing of the steps before that: they are taken to
        carry nothing. If they did, the first plan is for other lengths than the batch, and refused.

        Raises:
            ValueError: see `plan`.
        """
        if self._plans and self._next < min(self._plans):
            self._next += 1
            return _NOTHING_CARRIED
        return self.plan(lengths).carried

    def _missing(self, number: int) -> str:
        if number > max(self._plans, default=-1):
            return f"ends after {len(self._plans)} plans"
        return f"holds plans {min(self._plans)} to {max(self._plans)}, none of step {number}"
