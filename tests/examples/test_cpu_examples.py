"""The CPU examples, run for real but short: corpus, recipes, demo."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "examples" / "cpu"
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key != "DATA"},
    "PYTHON": sys.executable,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules beside the demo importable, as they are for the demo."""
    monkeypatch.syspath_prepend(str(CPU))


def test_corpus_holds_the_files_in_order(tmp_path: Path) -> None:
    from megatron_nsp.mcore.data_paths import DataPath
    from megatron_nsp.mcore.documents import IndexedDocuments

    sources = {"b.py": "b = 1\n", "a/z.py": "# ä\n", "a/b.py": "x" * 500, "empty.py": ""}
    left_out = {"site-packages/c.py": "c", "dist-packages/d.py": "d", "note.txt": "e"}
    for name, text in (sources | left_out).items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "source" / "unreadable.py").mkdir()
    build = [sys.executable, CPU / "build_corpus.py", "--folder", tmp_path / "source", "--output"]
    done = run(*build, tmp_path / "first")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0] == "3 documents, 511 tokens (bytes), longest 500"
    assert done.stdout.splitlines()[2] == "passed over: 1 empty, 1 unreadable files"
    documents = IndexedDocuments(DataPath("--data-path", (str(tmp_path / "first"),)))
    texts = [
        documents.read(number, 0, int(length)).astype(np.uint8).tobytes().decode()
        for number, length in enumerate(documents.lengths)
    ]
    assert texts == ["x" * 500, "# ä\n", "b = 1\n"]


def test_a_folder_without_python_files_is_refused(tmp_path: Path) -> None:
    done = run(sys.executable, CPU / "build_corpus.py", "--folder", tmp_path, "--output", "x")
    assert done.returncode == 2
    assert f"--folder {tmp_path} holds no Python file" in done.stdout


@pytest.mark.slow
def test_moe_recipe_builds_its_corpus_and_trains(tmp_path: Path) -> None:
    recipe = ROOT / "examples" / "moe" / "train.sh"
    done = run("bash", recipe, "--train-iters", 6, DATA=str(tmp_path / "stdlib"))
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\n[\d,]+ documents, [\d,]+ tokens \(bytes\), longest", "\n" + done.stdout)
    assert re.search(r"expert_model_parallel_size \.+ 2\n", done.stdout)
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 6 and np.isfinite(losses).all()
    assert losses[-1] < losses[0] < 6  # ln 256 = 5.55
    assert degrees_of(done.stdout) >= {1, 2}


def degrees_of(output: str) -> set[int]:
    """The degrees at which any step ran samples."""
    shares = re.findall(r"tokens per degree: ([^|]+)", output)
    return {int(degree) for share in shares for degree in re.findall(r"(\d+): ", share)}


@pytest.mark.slow
def test_demo_plans_trains_and_compares(tmp_path: Path) -> None:
    done = run(sys.executable, CPU / "demo.py", "--folder", tmp_path, "--steps", 6, "--batches", 2)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Warning" not in done.stdout and max(map(len, done.stdout.splitlines())) < 160
    _, corpus, plan, training, comparison = re.split(r"(?:^|\n)== .* ==\n", done.stdout)

    assert corpus.startswith(tuple("123456789"))
    nodes = re.findall(r"^ +(\d+):\d+ +(\d+) +[\d,]+ +([\d,]+) ", plan, re.MULTILINE)
    assert nodes and all(label == degree for label, degree, _ in nodes)

    steps = re.findall(r"^ +(\d)/6 +([\d.]+) +([\d,]+) +[\d.]+ +[\d,]+  (.*)$", training, re.M)
    assert [int(step[0]) for step in steps] == [1, 2, 3, 4, 5, 6]
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+) ", training).groups()
    assert 0 < float(last) < float(first) < 6
    assert any("," in degrees for _, _, _, degrees in steps), "no step mixes degrees"
    # the run planned what the demo showed: same cost model, same batch
    total = sum(int(tokens.replace(",", "")) for _, _, tokens in nodes)
    shown = {
        degree: sum(int(t.replace(",", "")) for _, d, t in nodes if d == degree) / total
        for _, degree, _ in nodes
    }
    ran = dict(re.findall(r"(\d+): (\d+)%", steps[0][3]))
    assert ran == {degree: f"{100 * share:.0f}" for degree, share in shown.items()}

    rows = re.findall(r"^(nested|static SP \d) +" + r" +([\d,.]+)" * 5, comparison, re.M)
    assert [row[0] for row in rows] == ["nested", "static SP 4", "static SP 2", "static SP 1"]
    numbers = {row[0]: [float(cell.replace(",", "")) for cell in row[1:]] for row in rows}
    assert all(row[:4] > [0] * 4 for row in numbers.values())
    predicted_ms = {name: row[0] for name, row in numbers.items()}
    assert predicted_ms["nested"] == min(predicted_ms.values())
    assert numbers["static SP 1"][4] == 0 < numbers["static SP 4"][4]


@pytest.mark.usefixtures("example_modules")
def test_a_failed_run_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import training_run

    recipe = tmp_path / "train.sh"
    recipe.write_text("seq 100; echo rank 2 fell over >&2; exit 3\n")
    monkeypatch.setattr(training_run, "RECIPE", recipe)
    with pytest.raises(training_run.RunFailedError) as failure:
        list(training_run.train(tmp_path / "log", tmp_path / "data"))
    lines = str(failure.value).splitlines()
    assert lines[-2:] == [
        "rank 2 fell over",
        f"the run failed; all it printed is in {tmp_path / 'log'}",
    ]
    assert "1" not in lines and "100" in lines  # the end only; the file holds all of it
    assert (tmp_path / "log").read_text().startswith("1\n2\n")
