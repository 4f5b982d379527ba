"""docs/moving-over.md: every command line on it says what the page says it does."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.mcore.command_line import parse
from tests.mcore.launch import MODEL, ROOT

pytestmark = pytest.mark.usefixtures("help_texts")

BLOCKS = re.findall(r"```\n(.*?)\n```", (ROOT / "docs" / "moving-over.md").read_text(), re.DOTALL)
JOBS = list(zip(BLOCKS[::2], BLOCKS[1::2], strict=True))
LEFT_OUT = {"--seq-length", "--max-position-embeddings", "512", "--calculate-per-token-loss"}
"""Flags of the model here that the page gives, and one that goes with them."""


@pytest.mark.parametrize(("flags", "said"), JOBS, ids=[flags[:60] for flags, _ in JOBS])
def test_a_command_line_says_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, flags: str, said: str
) -> None:
    # With context parallelism Megatron's validation asks the GPU for its capability.
    properties = SimpleNamespace(major=10, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: properties)
    model = [flag for flag in MODEL if flag not in LEFT_OUT]
    argv = [*model, "--max-position-embeddings", "512", *flags.replace("DOCS", str(prefix)).split()]
    if said.startswith("error: "):
        with pytest.raises(ValueError, match=f"^{re.escape(said.removeprefix('error: '))}$"):
            parse(monkeypatch, argv, num_ranks=8)
        return
    _, job = parse(monkeypatch, argv, num_ranks=8)
    lines = [notice for notice in job.notices if notice.startswith("--")]
    assert [f"nsp: {line}" for line in lines] == said.splitlines()


def test_the_page_counts_as_a_step_does(monkeypatch: pytest.MonkeyPatch, prefix: Path) -> None:
    properties = SimpleNamespace(major=10, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: properties)
    sizes = []
    for flags, _ in JOBS[:2]:
        model = [flag for flag in MODEL if flag not in LEFT_OUT]
        argv = [*model, "--max-position-embeddings", "512"]
        argv += flags.replace("DOCS", str(prefix)).split()
        _, job = parse(monkeypatch, argv, num_ranks=8)
        sizes.append((job.size.batches.train(0), job.tree.degrees, job.config.token_budget))
    # The documents have 512, 5 and 7 tokens: sixteen of them hold 2795 on average.
    assert sizes == [((8192, 8), (1, 2, 4, 8), None), ((2795, 2), (1, 2, 4, 8), 256)]
