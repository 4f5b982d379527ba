"""The body of the Slurm job, with stand-ins for `srun` and `scontrol` that start the tasks here.

A stand-in interpreter shows the launch commands in milliseconds; one real run trains on two "nodes"
of two ranks each.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data_maker import write_documents

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "slurm" / "train_cpu.sbatch"

SMALL_RUN = """
    --train-iters 2 --nsp-batch-tokens 700 --hidden-size 64 --ffn-hidden-size 128 --seq-length 512
    --max-position-embeddings 512
"""

# Starts the command once a node and fails with the first task that does, like the job's
# --kill-on-bad-exit; options come as --name=value.
SRUN = """#!/usr/bin/env bash
set -euo pipefail
while [[ $1 == -* ]]; do shift; done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for node in 0 1; do
  SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
done
wait -n
wait -n
"""
SCONTROL = """#!/usr/bin/env bash
[[ $* == "show hostnames node[0-1]" ]] && printf '127.0.0.1\\n127.0.0.1\\n'
"""
# Prints how it was called, in one write: two tasks print at the same time.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "called $(printf '%q ' "$@")"
exit "${PYTHON_EXIT:-0}"
"""


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_job(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the job's body as Slurm would on its first node."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    # variables the job reads and somebody may have set
    inherited = {key: value for key, value in os.environ.items() if key not in ("DATA", "ROOT")}
    path = {
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        ["bash", str(JOB), *flags],
        cwd=folder,
        env=inherited | slurm | path | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )


def calls(output: str) -> list[list[str]]:
    """The arguments of each call of the stand-in interpreter, in some order."""
    return sorted(shlex.split(line)[1:] for line in output.splitlines() if line[:7] == "called ")


def test_a_torchrun_starts_on_each_node(tmp_path: Path) -> None:
    data = tmp_path / "docs"
    (tmp_path / "docs.idx").touch()
    done = run_job(
        tmp_path, "--train-iters", "3", DATA=str(data), PYTHON=str(tmp_path / "bin" / "python")
    )
    assert done.returncode == 0, done.stdout
    launches = calls(done.stdout)
    assert len(launches) == 2
    for node, launch in enumerate(launches):
        script = launch.index("pretrain_nsp.py")
        assert launch[:script] == shlex.split(
            f"-m torch.distributed.run --node-rank {node} --nnodes 2 --nproc-per-node 2 "
            "--master-addr 127.0.0.1 --master-port 20007"
        )
        assert launch[-2:] == ["--train-iters", "3"]
        assert launch[launch.index("--data-path") + 1] == str(data)


def test_a_corpus_is_built_where_there_is_none(tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    done = run_job(tmp_path, DATA=str(tmp_path / "docs"), PYTHON=python)
    assert done.returncode == 0, done.stdout
    build = calls(done.stdout)[-1]
    assert build == ["examples/cpu/build_corpus.py", "--output", str(tmp_path / "docs")]
    assert (ROOT / build[0]).is_file()


def test_a_failing_task_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "docs.idx").touch()
    python = str(tmp_path / "bin" / "python")
    done = run_job(tmp_path, DATA=str(tmp_path / "docs"), PYTHON=python, PYTHON_EXIT="3")
    assert done.returncode == 3, done.stdout


def test_the_job_asks_for_two_nodes_and_one_task_on_each() -> None:
    head, _ = JOB.read_text().split("set -euo pipefail")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE))
    assert options["nodes"] == "2" and options["ntasks-per-node"] == "1"


@pytest.mark.slow
def test_two_nodes_of_two_ranks_train(tmp_path: Path) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3.5, 1.2, 100), 1, 400).astype(int)
    write_documents(tmp_path / "docs", lengths.tolist(), seed=1)
    done = run_job(
        tmp_path,
        *SMALL_RUN.split(),
        DATA=str(tmp_path / "docs"),
        PYTHON=sys.executable,
        MASTER_PORT=str(free_port()),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "using world size: 4, data-parallel size: 4" in done.stdout
    assert "nsp: 4 ranks in the domain" in done.stdout
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 2 and all(5 < loss < 6 for loss in losses)  # ln 256 = 5.55
