"""Pure tests of recorded plans: they come back as written, and those of another job are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.steps.replay import PlanRecorder, PlanReplay
from megatron_nsp.steps.sampler import always

TREE = SPTree(4, (1, 2, 4))
ONE = always(1)


def step(number: int) -> Plan:
    """A plan that tells its step: 6 tokens on each of two ranks, and `number` on another."""
    nodes = [TREE.node(2, 0), TREE.node(1, 3)]
    return Plan.from_nodes(TREE, [12, number + 1], nodes, token_budget=6)


def written(path: Path, *plans: Plan) -> str:
    path.write_text("".join(plan.to_json() + "\n" for plan in plans))
    return str(path)


def recorded(path: Path, first: int, last: int) -> list[str]:
    """The file after a run records steps first to last."""
    recorder = PlanRecorder(str(path))
    for number in range(first, last + 1):
        recorder.write(number, step(number))
    return path.read_text().splitlines()


def test_recorded_plans_come_back_in_order_and_then_the_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    recorded(path, 0, 2)
    replay = PlanReplay(str(path), TREE, ONE, token_budget=None)
    for number in range(3):
        assert replay.plan(step(number).lengths) == step(number)
    with pytest.raises(ValueError, match=f"file:{path} ends after 3 plans"):
        replay.plan(step(3).lengths)


def test_a_resumed_run_keeps_the_lines_before_it_and_replaces_the_others(tmp_path: Path) -> None:
    lines = recorded(tmp_path / "whole", 0, 4)
    path = tmp_path / "plans"
    recorded(path, 0, 3)
    assert recorded(path, 2, 2) == lines[:3]
    assert recorded(path, 3, 4) == lines


def test_a_run_from_the_start_replaces_a_file_and_nothing_is_touched_before(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    path.write_text("of another run\n")
    recorder = PlanRecorder(str(path))
    assert path.read_text() == "of another run\n"
    recorder.write(0, step(0))
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {"step": 0} | step(0).to_dict()


def test_a_resumed_run_that_begins_a_file_replays_from_its_own_step_on(tmp_path: Path) -> None:
    """Steps 2 to 4 in a new file: a run from step 2 or 3 finds them, one from 0 is refused."""
    path = tmp_path / "plans"
    assert [json.loads(line)["step"] for line in recorded(path, 2, 4)] == [2, 3, 4]
    for resumed_at in (2, 3, 4):
        replay = PlanReplay(str(path), TREE, ONE, None)
        for number in range(resumed_at):
            assert replay.carried(step(number).lengths).tolist() == []
        for number in range(resumed_at, 5):
            assert replay.plan(step(number).lengths) == step(number)
    with pytest.raises(ValueError, match=f"file:{path} holds plans 2 to 4, none of step 0"):
        PlanReplay(str(path), TREE, ONE, None).plan(step(0).lengths)


def test_a_run_that_resumes_on_a_later_file_keeps_its_steps_before_that(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    lines = recorded(path, 2, 4)
    assert recorded(path, 3, 3) == lines[:2]
    assert recorded(path, 1, 1) == recorded(tmp_path / "alone", 1, 1)


def test_a_step_in_the_middle_that_is_missing_is_never_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    recorded(path, 0, 0)
    recorded(path, 2, 2)  # of a run whose file was elsewhere in step 1
    replay = PlanReplay(str(path), TREE, ONE, None)
    assert replay.plan(step(0).lengths) == step(0)
    for next_step in (replay.plan, replay.carried):
        with pytest.raises(ValueError, match="holds plans 0 to 2, none of step 1"):
            next_step(step(1).lengths)


def test_skipped_steps_carry_what_their_plans_carried(tmp_path: Path) -> None:
    nodes = [TREE.node(1, 0), TREE.node(1, 1)]
    carries = Plan.from_nodes(TREE, [5, 3], nodes, micro_batch=[0, CARRIED])
    replay = PlanReplay(written(tmp_path / "plans", carries), TREE, ONE, None)
    assert replay.carried(carries.lengths).tolist() == [1]


def test_lines_without_a_step_are_counted_and_stay_so_when_a_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    written(path, step(0), step(1), step(2))
    recorded(path, 2, 3)
    replay = PlanReplay(str(path), TREE, ONE, None)
    assert [replay.plan(step(number).lengths) for number in range(4)] == list(map(step, range(4)))


def test_lines_out_of_order_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    lines = recorded(path, 0, 2)
    path.write_text("\n".join((lines[0], lines[2], lines[1])) + "\n")
    with pytest.raises(ValueError, match="line 3 is of step 1, the line before it of step 2"):
        PlanReplay(str(path), TREE, ONE, None)


def test_a_missing_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plans"
    with pytest.raises(ValueError, match=f"{path}: there is no folder {path.parent}"):
        PlanRecorder(str(path))


@pytest.mark.parametrize(
    ("tree", "num_micro_batches", "token_budget", "message"),
    [
        (SPTree(4, (1, 2)), 1, None, r"plan 1 has the tree SPTree\(.*, the job SPTree\("),
        (SPTree(8, (1, 2, 4)), 1, None, r"plan 1 has the tree SPTree\(.*, the job SPTree\("),
        (TREE, 2, None, "plan 1 has the micro-batches 1, the job 2"),
        (TREE, 1, 5, "plan 1 puts 6 tokens on a rank, over --nsp-token-budget 5"),
    ],
)
def test_a_plan_of_another_job_is_refused(
    tmp_path: Path, tree: SPTree, num_micro_batches: int, token_budget: int | None, message: str
) -> None:
    nodes = [tree.node(2, 0), tree.node(1, 3)]
    fits = Plan.from_nodes(tree, [10, 5], nodes, num_micro_batches=num_micro_batches)
    path = written(tmp_path / "plans", fits, step(0))
    with pytest.raises(ValueError, match=message):
        PlanReplay(path, tree, always(1, num_micro_batches), token_budget)


def test_the_budget_holds_in_every_micro_batch_and_may_be_used_up(tmp_path: Path) -> None:
    nodes = [TREE.node(1, 0), TREE.node(1, 0)]
    plan = Plan.from_nodes(TREE, [6, 7], nodes, micro_batch=[0, 1], num_micro_batches=2)
    path = written(tmp_path / "plans", plan)
    assert PlanReplay(path, TREE, always(1, 2), token_budget=7).plan(plan.lengths) == plan
    with pytest.raises(ValueError, match=r"plan 0 puts 7 tokens on a rank, over .* 6"):
        PlanReplay(path, TREE, always(1, 2), token_budget=6)


def test_a_plan_that_runs_nothing_is_refused(tmp_path: Path) -> None:
    plan = Plan.from_nodes(TREE, [5, 3], [TREE.node(1, 0)] * 2, micro_batch=[CARRIED] * 2)
    with pytest.raises(ValueError, match="plan 0 runs none of its 2 samples"):
        PlanReplay(written(tmp_path / "plans", plan), TREE, ONE, None)


@pytest.mark.parametrize("lengths", [[12], [12, 2], [1, 12], [12, 1, 1]])
def test_a_plan_for_other_lengths_than_the_batch_has_is_refused(
    tmp_path: Path, lengths: list[int]
) -> None:
    replay = PlanReplay(written(tmp_path / "plans", step(0)), TREE, ONE, None)
    message = f"plan 0 is for 2 samples of 13 tokens, the batch has {len(lengths)} of"
    with pytest.raises(ValueError, match=f"{message} {sum(lengths)}"):
        replay.plan(np.array(lengths))


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"file:{tmp_path}/none: there is no such file"):
        PlanReplay(f"{tmp_path}/none", TREE, ONE, None)
    path = tmp_path / "plans"
    no_step = json.dumps({"step": "next"} | step(0).to_dict())
    for damaged in (step(0).to_json()[:-9], "{}", step(0).to_json().replace("12", "13"), no_step):
        path.write_text(step(0).to_json() + "\n" + damaged + "\n")
        with pytest.raises(ValueError, match=f"file:{path}: line 2 is not a plan: "):
            PlanReplay(str(path), TREE, ONE, None)
