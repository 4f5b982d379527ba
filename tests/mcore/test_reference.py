"""Nested training against Megatron alone: the one comparison in which both sides share nothing.

The other tests compare placements with one another; what every placement gets wrong shows here.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data_maker import write_documents
from tests.mcore.launch import MODEL, MOE, ROOT, environment, shared_checkpoint, train
from tests.mcore.plans import batches, mixed, record
from tests.mcore.test_cases import TREE

LENGTHS = [130, 77, 64, 31, 8, 3, 1, 2, 55]


@pytest.mark.parametrize("model", [[], MOE], ids=["dense", "moe"])
def test_nested_equals_megatron_alone(tmp_path: Path, model: list[str]) -> None:
    write_documents(tmp_path / "docs", LENGTHS, seed=3)
    exact = [*model, "--probe-float64"]
    start = shared_checkpoint(tmp_path, tmp_path / "docs", *exact)
    common = [*MODEL, *model, *start, "--train-iters", "1"]
    plain = ["--documents", str(tmp_path / "docs"), "--lengths", ",".join(map(str, LENGTHS))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.mcore.plain", str(tmp_path / "plain.pt"), *common, *plain],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    expected = torch.load(tmp_path / "plain.pt", weights_only=False)
    record(tmp_path / "plans", TREE, batches(tmp_path / "docs", 1, sum(LENGTHS)), (mixed,))
    data = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", str(sum(LENGTHS))]
    data += [*start, "--train-iters", "1"]
    for ranks, policy in ((1, []), (4, ["--nsp-policy", f"file:{tmp_path / 'plans'}"])):
        run = train(ranks, tmp_path / str(ranks), *exact, *data, *policy)
        losses = run.token_losses(0)
        assert losses.keys() == expected["losses"].keys()
        assert max(abs(losses[key] - loss) for key, loss in expected["losses"].items()) < 1e-9
        grads = run.grads(0)
        assert grads.keys() == expected["grads"].keys()
        for name, grad in expected["grads"].items():
            assert grad.dtype == torch.float64
            error = float((grads[name] - grad).norm()) / max(float(grad.norm()), 1e-12)
            assert error < 1e-9, (ranks, name, error)
