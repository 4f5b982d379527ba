"""A rank that fails ends the job soon, and its own message comes first. Case L4, first half."""

import time
from pathlib import Path

from tests.data_maker import write_documents
from tests.mcore.launch import train, train_with_torchrun
from tests.mcore.plans import batches, record, root
from tests.mcore.test_cases import TREE

TIMEOUT_S = 15


def test_l4_a_failing_rank_ends_the_job_and_says_why(tmp_path: Path) -> None:
    lengths = [90, 40, 17, 5]
    write_documents(tmp_path / "docs", lengths, seed=3)
    record(tmp_path / "plans", TREE, batches(tmp_path / "docs", 3, sum(lengths)), (root,))
    flags = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", str(sum(lengths))]
    flags += ["--train-iters", "3", "--nsp-policy", f"file:{tmp_path / 'plans'}"]
    flags += ["--distributed-timeout-seconds-after-init", str(TIMEOUT_S)]
    run = train_with_torchrun(4, tmp_path / "run", *flags, "--probe-fail=1:2", timeout_s=240)
    failed_at_s = float((tmp_path / "run" / "failed_at").read_text())
    assert time.time() - failed_at_s < 2 * TIMEOUT_S
    assert run.returncode
    messages = [line for line in run.output.splitlines() if line.startswith("nsp: rank")]
    assert messages[0].startswith("nsp: rank 1, step 2, documents [")
    assert "NodeError: fwd prologue of node 4:0: MemoryError: made up for the test" in messages[0]


def test_ranks_that_plan_differently_all_stop_before_the_step(tmp_path: Path) -> None:
    write_documents(tmp_path / "docs", [90, 40, 17, 5], seed=3)
    flags = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", "152"]
    flags += ["--train-iters", "4", "--probe-other-plan=2:3"]
    run = train(4, tmp_path / "run", *flags, check=False)
    assert run.returncode
    messages = [line for line in run.output.splitlines() if line.startswith("nsp: rank")]
    assert messages and all("plans of step 3 differ between ranks" in line for line in messages)
    assert run.output.count("] iteration ") == 2
