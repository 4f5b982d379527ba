"""Nested training against Megatron alone: the one comparison in which both sides share nothing.

The other tests compare placements with one another; what every placement gets wrong shows here.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.data_maker import write_documents
from tests.mcore.launch import (
    LATENT,
    MOE,
    Run,
    model_flags,
    run_forked,
    shared_checkpoint,
    train,
)
from tests.mcore.plans import batches, each_degree, mixed, record
from tests.mcore.test_cases import TREE

LENGTHS = [130, 77, 64, 31, 8, 3, 1, 2, 55]


WINDOWS = ["--window-size", "20,0", "--window-attn-skip-freq", "2"]
LISTED = ["--window-size", "5,0", "--window-attn-skip-freq", "[0,1]"]
YARN = ["--position-embedding-type", "yarn", "--rotary-scaling-factor", "4", "--mscale", "0.8"]
SCALE = ["--use-mup", "--kv-channels", "64"]
MTP = ["--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3"]
HYBRID = ["--spec", "tests.mcore.local_stack", "SPEC", "--hybrid-layer-pattern"]
MODELS: dict[str, list[str]] = {
    "dense": [],
    "moe": MOE,
    "windows in every other layer": WINDOWS,
    "sinks and windows in listed layers": ["--softmax-type", "learnable", *LISTED],
    "off by one, yarn, norms and scale": [
        *("--softmax-type", "off-by-one", "--qk-layernorm"),
        *YARN,
        *SCALE,
    ],
    "full masks": ["--spec", "tests.mcore.full_mask", "layer_spec"],
    "latent": [*LATENT, "rope"],
    "further tokens": MTP,
    "hybrid": [*HYBRID, "*-*E-", *WINDOWS, *MOE],
    "latent yarn": [*LATENT, *["yarn", "--rotary-scaling-factor", "4", "--mscale-all-dim", "0.7"]],
}


def plain(out: Path, documents: Path, *flags: str, lengths: Sequence[int] = tuple(LENGTHS)) -> dict:
    """Losses and gradients of Megatron alone."""
    args = ["--documents", str(documents), "--lengths", ",".join(map(str, lengths))]
    argv, log = [str(out), *model_flags(flags), *args], out.with_suffix(".log")
    code = run_forked("plain", True, 1, argv, log)
    assert code == 0, log.read_text()[-3000:]
    results: dict = torch.load(out, weights_only=False)
    return results


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_nested_equals_megatron_alone(tmp_path: Path, model: list[str]) -> None:
    write_documents(tmp_path / "docs", LENGTHS, seed=3)
    exact = [*model, "--probe-float64", "--init-method-std", "0.2"]
    start = shared_checkpoint(tmp_path, tmp_path / "docs", *exact)
    expected = plain(tmp_path / "plain.pt", tmp_path / "docs", *model, *start, "--train-iters", "1")
    drawn = batches(tmp_path / "docs", 2, sum(LENGTHS))
    record(tmp_path / "plans", TREE, drawn, (mixed, each_degree))
    data = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", str(sum(LENGTHS))]
    data += [*start, "--train-iters", "2", "--lr", "0"]
    for ranks, policy in ((1, []), (4, ["--nsp-policy", f"file:{tmp_path / 'plans'}"])):
        run = train(ranks, tmp_path / str(ranks), *exact, *data, *policy)
        for step in range(2):
            assert_equals_plain(run, step, expected)


def assert_equals_plain(run: Run, step: int, expected: dict) -> None:
    """Every token's loss and every gradient of a step."""
    losses, grads = run.token_losses(step), run.grads(step)
    assert losses.keys() == expected["losses"].keys()
    assert max(abs(losses[key] - loss) for key, loss in expected["losses"].items()) < 1e-9
    assert run.mtp_losses[step] == pytest.approx(expected["mtp_losses"], rel=1e-9)
    assert grads.keys() == expected["grads"].keys()
    for name, grad in expected["grads"].items():
        assert grad.dtype == torch.float64
        assert difference(grads[name], grad) < 1e-9, (step, name)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float((one - other).norm()) / max(float(other.norm()), 1e-12)


@pytest.fixture(scope="module")
def unmasked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict]:
    """A checkpoint of the dense model, and its results."""
    folder = tmp_path_factory.mktemp("unmasked")
    write_documents(folder / "docs", LENGTHS, seed=3)
    exact = ["--probe-float64", "--init-method-std", "0.2"]
    start = [*shared_checkpoint(folder, folder / "docs", *exact), "--train-iters", "1"]
    return folder, start, plain(folder / "plain.pt", folder / "docs", *start)


@pytest.mark.parametrize(
    "feature", [WINDOWS, LISTED, ["--softmax-type", "off-by-one"], YARN, SCALE[:1]], ids=str
)
def test_what_is_compared_matters(
    unmasked: tuple[Path, list[str], dict], feature: list[str]
) -> None:
    folder, start, without = unmasked
    results = plain(folder / "other.pt", folder / "docs", *start, *feature)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert difference(results["grads"][name], without["grads"][name]) > 1e-2
