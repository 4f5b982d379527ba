"""The patches apply to the installed Megatron and reverse, and a patched tree trains by itself.

Nothing installed is written to: every test works on a copy.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data_maker import write_documents

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
APPLY = {"git": "git apply", "patch": "patch -p1 -i"}
REVERSE = {"git": "git apply -R", "patch": "patch -R -p1 -i"}

NUM_STEPS = 2
BATCH_TOKENS = 700
FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention
    --num-query-groups 2 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --hidden-dropout 0 --seq-length 512
    --max-position-embeddings 512 --calculate-per-token-loss --tokenizer-type NullTokenizer
    --vocab-size 256 --lr 1e-3 --train-iters {NUM_STEPS} --log-interval 1 --seed 7 --nsp-cpu
    --nsp-batch-tokens {BATCH_TOKENS}
""".split()
# What pretrain_nsp.py sets for its users; a script of one's own is given it like any other flag.
OWN_SCRIPT_FLAGS = """
    --micro-batch-size 1 --attention-dropout 0 --eval-iters 0 --eval-interval 100
    --transformer-impl local --distributed-backend gloo --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm
"""


def megatron_folder() -> Path:
    """The installed `megatron` folder, found without importing it."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def run(folder: Path, *command: str, **environment: str) -> str:
    """Runs a command in a folder, one thread a process; returns what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        # the ceiling hides a repository that may lie around the folder: git apply would skip
        # files outside of it without a word
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-6000:]}"
    return done.stdout


def patched_files(patch: Path) -> list[str]:
    """The files a patch changes, from the root of a tree."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)


def test_there_is_one_patch_a_reason() -> None:
    assert [patched_files(patch) for patch in PATCHES] == [
        ["megatron/core/parallel_state.py"],
        ["megatron/training/datasets/data_samplers.py"],
        ["megatron/training/arguments.py"],
    ]
    readme = (ROOT / "patches" / "README.md").read_text()
    for patch in PATCHES:
        assert patch.name in readme


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_is_small_and_only_adds(patch: Path) -> None:
    reason, diff = patch.read_text().split("diff --git", maxsplit=1)
    assert "Reason: " in reason
    assert len(re.findall(r"^-(?!-- )", diff, re.MULTILINE)) == 0
    assert len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)) <= 20


@pytest.mark.parametrize("tool", APPLY)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies_and_reverses(patch: Path, tool: str, tmp_path: Path) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    (name,) = patched_files(patch)
    copy, original = tmp_path / name, megatron_folder().parent / name
    copy.parent.mkdir(parents=True)
    shutil.copyfile(original, copy)
    run(tmp_path, *APPLY[tool].split(), str(patch))
    assert "megatron_nsp" in copy.read_text()
    compile(copy.read_text(), name, "exec")
    run(tmp_path, *REVERSE[tool].split(), str(patch))
    assert copy.read_bytes() == original.read_bytes()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [copy]


@dataclass(frozen=True)
class Tree:
    """A patched copy of Megatron and documents to train on."""

    root: Path

    def python(self, *command: str, **environment: str) -> str:
        """Runs Python with the patched Megatron before the installed one."""
        path = os.pathsep.join([str(self.root), str(ROOT), os.environ.get("PYTHONPATH", "")])
        return run(self.root, sys.executable, *command, PYTHONPATH=path, **environment)

    def train(self, script: Path, *flags: str, **environment: str) -> list[float]:
        """Trains on two ranks; returns the losses."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        data = ["--train-data-path", str(self.root / "docs")]
        output = self.python(*torchrun, str(script), *FLAGS, *data, *flags, **environment)
        assert "2 ranks in the domain, degrees [1, 2]" in output
        losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]
        assert len(losses) == NUM_STEPS and np.isfinite(losses).all()
        return losses


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy of the installed Megatron with all patches."""
    root = tmp_path_factory.mktemp("megatron-tree")
    # with the compiled modules beside the sources: they stay valid, for times are copied too
    shutil.copytree(megatron_folder(), root / "megatron")
    for patch in PATCHES:
        run(root, "git", "apply", str(patch))
    lengths = np.clip(np.random.default_rng(0).lognormal(3.5, 1.2, 100), 1, 400).astype(int)
    write_documents(root / "docs", lengths.tolist(), seed=1)
    return Tree(root)


def test_a_patched_tree_trains(tree: Tree) -> None:
    """With a script that leaves everything to the tree, and the same with pretrain_nsp.py."""
    record = tree.root / "found.json"
    losses = tree.train(HERE / "own_script.py", *OWN_SCRIPT_FLAGS.split(), FOUND=str(record))
    found: dict[str, Any] = json.loads(record.read_text())
    assert found == {
        "core": str(tree.root / "megatron" / "core" / "__init__.py"),
        # 0001: Megatron's own function, not a wrapper of ours, made the group and took it back
        "initialize_from": "megatron.core.parallel_state",
        "num_groups": 1,
        "groups_after_destroy": False,
        # 0002: the provider returned documents, whose iterators are made for chunks of a model
        "iterator": "_tee",
        # 0003
        "batch_tokens": BATCH_TOKENS,
    }
    # pretrain_nsp.py brings flags, groups and iterator itself and must not do so twice.
    assert tree.train(ROOT / "pretrain_nsp.py") == pytest.approx(losses, rel=1e-5)


def test_a_run_without_nesting_is_untouched(tree: Tree) -> None:
    assert tree.python(str(HERE / "without_nsp.py"), str(tree.root)).endswith("untouched\n")
