"""A run as a whole: resume, evaluation, pipeline stages, a budget that carries samples over."""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.plan.tree import SPTree
from tests.data_maker import write_documents
from tests.mcore.launch import Run, shared_checkpoint, train
from tests.mcore.plans import batches, mixed, record
from tests.mcore.test_equality import assert_same

LENGTHS = [130, 77, 64, 31, 8, 3, 1, 90, 55, 200, 12, 5] * 5


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Sixty documents, about five of them in each step."""
    write_documents(tmp_path / "docs", LENGTHS, seed=3)
    return ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", "300"]


def documents_of(run: Run, step: int) -> set[int]:
    """The documents that had a target in a step."""
    return {document for document, _ in run.token_losses(step)}


@pytest.mark.parametrize("budget", [None, 100])
def test_a_resumed_run_goes_on_where_it_stopped(
    tmp_path: Path, flags: list[str], budget: int | None
) -> None:
    if budget is not None:
        flags += ["--nsp-token-budget", str(budget)]
    flags += ["--train-iters", "4"]
    save = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "2", "--exit-interval", "2"]
    whole = train(4, tmp_path / "whole", *flags)
    train(4, tmp_path / "first", *flags, *save)
    second = train(4, tmp_path / "second", *flags, "--load", str(tmp_path / "checkpoint"))
    assert second.losses == whole.losses[2:]
    for step in range(2):
        assert documents_of(second, step) == documents_of(whole, step + 2)


def test_k2_fewer_ranks_go_on_with_the_next_documents(tmp_path: Path, flags: list[str]) -> None:
    flags += ["--train-iters", "4"]
    save = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "2", "--exit-interval", "2"]
    whole = train(4, tmp_path / "whole", *flags)
    train(4, tmp_path / "first", *flags, *save)
    # Megatron counts its schedule in steps times ranks, and wants to be told that it may differ.
    load = ["--load", str(tmp_path / "checkpoint"), "--override-opt_param-scheduler"]
    second = train(2, tmp_path / "second", *flags, *load)
    np.testing.assert_allclose(second.losses, whole.losses[2:], rtol=1e-5)
    for step in range(2):
        assert documents_of(second, step) == documents_of(whole, step + 2)


def test_resuming_on_other_data_is_refused_and_a_record_goes_on(
    tmp_path: Path, flags: list[str]
) -> None:
    plans = tmp_path / "plans.jsonl"
    flags += ["--train-iters", "4", "--nsp-record-plans", str(plans)]
    save = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "2", "--exit-interval", "2"]
    train(2, tmp_path / "whole", *flags)
    whole = plans.read_text()
    plans.unlink()
    train(2, tmp_path / "first", *flags, *save)
    load = ["--load", str(tmp_path / "checkpoint")]
    train(2, tmp_path / "second", *flags, *load)
    assert plans.read_text() == whole and whole.count("\n") == 4
    # A resumed run that begins a file of its own; and one that replays it from the same step on.
    later = tmp_path / "later.jsonl"
    resumed = train(2, tmp_path / "later", *flags, *load, "--nsp-record-plans", str(later))
    assert later.read_text().splitlines() == whole.splitlines()[2:]
    again = [*flags[:-2], *load, "--nsp-policy", f"file:{later}"]
    assert train(2, tmp_path / "again", *again).losses == resumed.losses
    write_documents(tmp_path / "other", LENGTHS[1:], seed=3)
    for change, message in (
        (["--seed", "9"], "made with --seed 7, this run has 9"),
        (["--nsp-batch-tokens", "100"], "made with --nsp-batch-tokens 300, this run has 100"),
        (["--data-path", str(tmp_path / "other")], "made with --data-path 60 documents"),
        (["--nsp-token-budget", "400"], "made with --nsp-token-budget None, this run has 400"),
    ):
        run = train(2, tmp_path / "refused", *flags, *load, *change, check=False)
        assert run.returncode == 2 and message in run.output, (change, run.output[-2000:])
        assert "Traceback" not in run.output


def test_samples_over_the_budget_are_carried_and_none_is_lost(
    tmp_path: Path, flags: list[str]
) -> None:
    # 4 ranks times 60 tokens hold less than the 300 tokens that a step draws.
    run = train(4, tmp_path / "run", *flags, "--nsp-token-budget", "60", "--train-iters", "4")
    assert "carried to the next step: " in run.output
    trained = [(step, document) for step in range(4) for document in documents_of(run, step)]
    drawn = np.concatenate([b.documents for b in batches(tmp_path / "docs", 2, 300)]).tolist()
    with_targets = {document for document in drawn if LENGTHS[document] > 1}
    assert with_targets <= {document for _, document in trained}


def test_evaluation_gives_the_training_loss_of_the_validation_documents(
    tmp_path: Path, flags: list[str]
) -> None:
    lengths = [140, 1, 77, 50, 32]  # one epoch a step, unlike the training documents
    write_documents(tmp_path / "valid", lengths, seed=4)
    frozen = ["--lr", "0", "--probe-float64", "--nsp-batch-tokens", str(sum(lengths))]
    alone = ["--data-path", str(tmp_path / "valid"), "--train-iters", "1"]
    (expected,) = train(1, tmp_path / "alone", *frozen, *alone).losses
    flags[0] = "--train-data-path"
    flags += ["--valid-data-path", str(tmp_path / "valid"), "--train-iters", "2"]
    flags += ["--eval-iters", "2", "--eval-interval", "2", *frozen]
    for ranks in (1, 4):
        run = train(ranks, tmp_path / str(ranks), *flags)
        lines = [line for line in run.output.splitlines() if "validation loss at" in line]
        values = [float(line.split("lm loss value:")[1].split()[0]) for line in lines]
        assert values
        np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert not np.isclose(run.losses, expected, rtol=1e-5).any()


def test_pipeline_stages_train_as_one_rank(tmp_path: Path, flags: list[str]) -> None:
    start = shared_checkpoint(tmp_path, tmp_path / "docs", "--probe-float64")
    flags += [*start, "--probe-float64", "--train-iters", "3"]
    one = train(1, tmp_path / "one", *flags)
    tree, plans = SPTree(2, (1, 2)), tmp_path / "plans.jsonl"
    record(plans, tree, batches(tmp_path / "docs", 3, 300), (mixed,))
    split = ["--pipeline-model-parallel-size", "2", "--nsp-policy", f"file:{plans}"]
    four = train(4, tmp_path / "four", *flags, *split)
    assert_same(one, four, 3, 1e-9, 1e-9)


def test_megatron_fsdp_trains_as_plain_data_parallelism(tmp_path: Path, flags: list[str]) -> None:
    flags += ["--train-iters", "4", "--nsp-policy", "root"]
    sharded = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --use-distributed-optimizer"
    )
    plain = train(4, tmp_path / "plain", *flags)
    fsdp = train(4, tmp_path / "fsdp", *flags, *sharded.split())
    assert any(rank[0]["records"] for rank in fsdp.steps)
    assert any(grad.isnan().any() for grad in fsdp.steps[0][0]["grads"].values())
    assert_same(plain, fsdp, 4, 1e-6, 1e-6)


def test_every_step_says_how_long_exchanges_were_exposed(tmp_path: Path, flags: list[str]) -> None:
    flags += ["--train-iters", "3", "--nsp-policy", "root"]
    streamed = train(4, tmp_path / "streamed", *flags)
    serial = train(4, tmp_path / "serial", *flags, "--no-nsp-overlap")
    assert serial.losses == streamed.losses
    line = r"^nsp(?: step (\d+) .* \||:) exposed in step (\d+): ([\d.]+) ms$"
    for run in (streamed, serial):
        found = re.findall(line, run.output, re.MULTILINE)
        assert [entry[:2] for entry in found] == [("2", "1"), ("3", "2"), ("", "3")]
        assert all(float(entry[2]) > 0 for entry in found)


def test_every_policy_trains_to_the_losses_of_the_search(tmp_path: Path, flags: list[str]) -> None:
    flags += ["--train-iters", "2", "--global-batch-size", "16"]
    search = train(4, tmp_path / "search", *flags, "--nsp-policy", "search")
    for policy in ("dp", "algorithm-1", "flexsp", "megatron-dynamic-cp"):
        other = train(4, tmp_path / policy, *flags, "--nsp-policy", policy)
        np.testing.assert_allclose(other.losses, search.losses, rtol=1e-5)
