"""The scaffold: numpy levels without torch, finding a Python, remaking .venv, structure.

No test here installs anything: setup runs in a scratch project with a stand-in for Python.
"""

import ast
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_nsp"

# --- numpy levels ---------------------------------------------------------------------------------

# Every other child of the package is numpy only, also one added later.
HIGHER_LEVELS = {"runtime", "testing", "mcore", "cli"}


def numpy_modules() -> list[str]:
    """Names of the modules at the numpy levels."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    parts = (path.parts for path in paths if path.parts[0] not in HIGHER_LEVELS)
    return sorted(".".join([PACKAGE.name, *part]).removesuffix(".__init__") for part in parts)


# Imports each module named on stdin with heavy and optional packages made unimportable.
IMPORT_WITHOUT = """
import importlib, json, sys
BLOCKED = {"torch", "megatron", "transformer_engine", "flash_attn", "scipy", "matplotlib"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is out of reach of the numpy levels", name=name)
sys.meta_path.insert(0, Blocker())
failures = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
json.dump(failures, sys.stdout)
"""


def import_without_torch(names: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT],
        input=json.dumps(names), cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Error by module, from one process for all: starting numpy dominates the cost."""
    return import_without_torch(numpy_modules())


@pytest.mark.parametrize("name", numpy_modules())
def test_numpy_level_imports_without_torch(name, failures):
    assert name not in failures, failures[name]


def test_blocker_blocks():
    assert "out of reach" in import_without_torch(["torch"])["torch"]


# --- imports outside the package ------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere, relative imports left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {entry.name for entry in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def roots(names: set[str]) -> set[str]:
    """Their first parts."""
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "examples", "megatron_nsp"])
def test_nothing_outside_the_tests_imports_them(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [path.name for path in paths if "tests" in roots(imported(path))] == []


def test_the_scorer_knows_nothing_of_what_it_scores():
    names = imported(PACKAGE / "testing/scorer.py")
    assert roots(names) == {"collections", "dataclasses", "typing"}


# --- scripts/setup.sh -----------------------------------------------------------------------------

# Answers setup's three uses of Python: probe, venv, pip. It makes a venv by copying itself; pip
# leaves a line in pip.calls and fails while the file pip.broken exists.
FAKE_PYTHON = """#!/bin/sh
case "$2" in
  -c) echo "{version} {path}" ;;
  venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  pip) echo "$*" >> pip.calls; echo "pip's own words"; [ ! -e pip.broken ] ;;
esac
"""
TOOLS = ["sh", "bash", "awk", "cat", "cksum", "cp", "dirname", "mkdir", "rm", "tail"]


def write_executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_python(path: Path, version: str = "3.12.99") -> Path:
    return write_executable(path, FAKE_PYTHON.format(version=version, path=path))


class Machine:
    """A scratch project on a machine with the tools setup.sh needs and no Python."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin, self.project = folder / "home", folder / "bin", folder / "project"
        for made in (self.home, self.bin, self.project / "scripts"):
            made.mkdir(parents=True)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        shutil.copy(ROOT / "scripts/setup.sh", self.project / "scripts")
        (self.project / "pyproject.toml").write_text("[project]\n")
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "SETUP_SYSTEM_ROOT": str(folder / "empty"),
        }

    def setup(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [self.bin / "bash", "scripts/setup.sh", *args]
        return subprocess.run(
            command, cwd=self.project, env=self.env, capture_output=True, text=True
        )

    def found(self) -> str:
        done = self.setup("--find-python")
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    @property
    def num_pip_runs(self) -> int:
        return len((self.project / "pip.calls").read_text().splitlines())


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_find_python_on_this_machine():
    done = subprocess.run(
        ["bash", "scripts/setup.sh", "--find-python"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    version = subprocess.check_output(
        [done.stdout.strip(), "-c", "import sys; print(sys.version_info >= (3, 12))"], text=True
    )
    assert version == "True\n"


def test_no_python_is_one_line_and_exit_1(machine):
    done = machine.setup()
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "Python >= 3.12" in done.stderr
    assert not (machine.project / ".venv").exists()


@pytest.mark.parametrize(
    "place",
    [
        "bin/python3",
        "home/.pyenv/versions/3.12.99/bin/python",
        "home/miniforge3/envs/train/bin/python",
        "home/.local/share/uv/python/cpython-3.12.99-linux/bin/python3",
        "home/.asdf/installs/python/3.12.99/bin/python",
        "home/.local/share/mise/installs/python/3.12.99/bin/python",
        "empty/usr/local/bin/python3.12",
        "empty/opt/conda/bin/python",
    ],
)
def test_find_python_in(place, machine, tmp_path):
    python = fake_python(tmp_path / place)
    assert machine.found() == str(python)


def test_find_python_in_pyenv_root_behind_a_dead_shim(machine, tmp_path):
    write_executable(machine.bin / "python3.12", "#!/bin/sh\necho 'not selected' >&2\nexit 127\n")
    python = fake_python(tmp_path / "pyenv root/versions/3.12.99/bin/python")
    machine.env["PYENV_ROOT"] = str(tmp_path / "pyenv root")
    assert machine.found() == str(python)


def test_find_python_asks_uv_and_conda(machine, tmp_path):
    python = fake_python(tmp_path / "elsewhere/bin/python")
    uv = write_executable(machine.bin / "uv", f"#!/bin/sh\necho 'cpython-3.12.99  {python}'\n")
    assert machine.found() == str(python)
    uv.unlink()
    machine.env["CONDA_EXE"] = str(tmp_path / "elsewhere/bin/conda")
    assert machine.found() == str(python)


def test_probe_refuses_an_old_python(machine):
    """The probe runs real Python code: an old version must fail it, not only a missing one."""
    script = (ROOT / "scripts/setup.sh").read_text()
    code = script.split(" -I -c '")[1].split("'")[0]
    assert "(3, 12)" in code
    newer = code.replace("(3, 12)", "(99, 0)")
    for text, status in ((code, 0), (newer, 1)):
        assert subprocess.run([sys.executable, "-I", "-c", text]).returncode == status


def test_setup_installs_once(machine):
    fake_python(machine.bin / "python3.12")
    first, second = machine.setup(), machine.setup()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "--editable .[dev]" in (machine.project / "pip.calls").read_text()
    assert "pip's own words" not in first.stdout
    assert (second.stdout, second.stderr) == ("", "")
    assert machine.num_pip_runs == 1


def test_setup_starts_anew_after_a_failure(machine):
    fake_python(machine.bin / "python3.12")
    broken = machine.project / "pip.broken"
    broken.touch()
    failed = machine.setup()
    assert failed.returncode == 1
    assert "pip's own words" in failed.stderr
    leftover = machine.project / ".venv/half-unpacked"
    leftover.touch()
    broken.unlink()
    assert machine.setup().returncode == 0
    assert not leftover.exists()


@pytest.mark.parametrize("broken", ["", "bin", "bin/python"])
def test_setup_replaces_a_half_made_venv(broken, machine):
    fake_python(machine.bin / "python3.12")
    (machine.project / ".venv" / broken).mkdir(parents=True)
    assert machine.setup().returncode == 0
    assert machine.num_pip_runs == 1


def test_setup_replaces_a_venv_whose_python_is_gone(machine):
    fake_python(machine.bin / "python3.12")
    machine.setup()
    (machine.project / ".venv/bin/python").unlink()
    assert "making" in machine.setup().stdout
    assert machine.num_pip_runs == 2


def test_setup_refreshes_in_place_when_requirements_change(machine):
    fake_python(machine.bin / "python3.12")
    machine.setup()
    kept = machine.project / ".venv/kept"
    kept.touch()
    (machine.project / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert "refreshing" in done.stdout
    assert kept.exists()
    assert machine.setup().stdout == ""


def test_setup_remakes_a_moved_venv(machine, tmp_path):
    fake_python(machine.bin / "python3.12")
    machine.setup()
    machine.project = machine.project.rename(tmp_path / "moved")
    assert "making" in machine.setup().stdout


def test_ci_run_makes_the_test_target_from_anywhere(tmp_path):
    make = write_executable(tmp_path / "bin/make", '#!/bin/sh\necho "$PWD $*"\n')
    env = {**os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}"}
    said = subprocess.check_output([ROOT / ".ci/run"], cwd=tmp_path, env=env, text=True)
    assert said == f"{ROOT} test\n"


# --- scripts/te_venv.sh ---------------------------------------------------------------------------


def te_venv(folder, **environment):
    """Runs a copy of scripts/te_venv.sh."""
    (folder / "scripts").mkdir(exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "scripts" / "te_venv.sh", folder / "scripts")
    return subprocess.run(
        ["bash", "scripts/te_venv.sh"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
    )


def test_transformer_engine_without_a_cuda_toolkit_says_so(tmp_path):
    done = te_venv(tmp_path, CUDA_HOME="/no/toolkit")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == (
        "te_venv: /no/toolkit/bin/nvcc is not there; set CUDA_HOME to a CUDA 13 toolkit\n"
    )
    assert not (tmp_path / ".te-venv").exists()


def test_transformer_engine_is_built_once(tmp_path):
    te_venv(tmp_path, CUDA_HOME="/no/toolkit")
    files = ["pyproject.toml", "scripts/te_venv.sh"]
    sums = subprocess.check_output(
        f"cat {' '.join(files)} | cksum", shell=True, cwd=tmp_path, text=True
    )
    (tmp_path / ".te-venv").mkdir()
    (tmp_path / ".te-venv" / "te.stamp").write_text(f"{tmp_path} {sums}")
    done = te_venv(tmp_path, CUDA_HOME="/no/toolkit")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- scripts/structure.py -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def structure():
    spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts/structure.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan_batch", []),
        ("utilisation", []),
        ("group_mgr", ["mgr"]),
        ("TmpStore", ["tmp"]),
        ("IOUtils", ["utils"]),
        ("__misc_helper__", ["misc", "helper"]),
    ],
)
def test_banned_words(name, words, structure):
    assert structure.banned_words(name) == words


def package(folder: Path, **sources: str) -> Path:
    """A checkout with a package of these modules; a double underscore stands for a folder."""
    for name, source in sources.items():
        path = folder / "megatron_nsp" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source if source.startswith('"""') else '"""A module."""\n' + source)
    return folder


TYPED = 'def f(x: int) -> int:\n    """Doubles."""\n    return 2 * x\n'
CLASS = 'class C(B):\n    """A class."""\n\n'


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        (TYPED, None),
        (TYPED.replace("x: int", "x"), "f is not typed"),
        (TYPED.replace(" -> int", ""), "f is not typed"),
        (TYPED.replace("x: int", "*x"), "f is not typed"),
        ("def f() -> None: ...\n", "f has no docstring"),
        ("def _f() -> None: ...\n", None),
        ("class C: ...\n", "C has no docstring"),
        ("class _C:\n    def f(self) -> None: ...\n", None),
        (CLASS + "    def f(self) -> None: ...\n", "C.f has no docstring"),
        (CLASS + "    @override\n    def f(self) -> None: ...\n", None),
        (CLASS.replace("class C", "class TmpStore"), "banned word 'tmp' in TmpStore"),
    ],
)
def test_rules_of_one_file(source, finding, structure, tmp_path):
    found = structure.measure(structure.read_package(package(tmp_path, plan__a=source))).findings
    assert [line.partition(": ")[2] for line in found] == ([finding] if finding else [])


def test_banned_words_in_module_names(structure, tmp_path):
    root = package(tmp_path, utils__a="")
    (finding,) = structure.measure(structure.read_package(root)).findings
    assert finding == "megatron_nsp/utils/a.py:1: banned word 'utils' in the module name"


def test_rooms_and_arrows(structure, tmp_path):
    root = package(
        tmp_path,
        config="from megatron_nsp.plan.a import f\n",
        plan__a="",
        plan__b="from megatron_nsp.plan.a import f\n",
        runtime__c="import megatron_nsp.plan.b\nfrom megatron_nsp.runtime.kernels import d\n",
        runtime__kernels__d="from megatron_nsp.runtime import c\n",
    )
    counted = structure.measure(structure.read_package(root))
    config, plan, runtime, kernels = (
        "megatron_nsp." + room for room in ("config", "plan", "runtime", "runtime.kernels")
    )
    assert counted.rooms == {config, plan, runtime, kernels}
    assert counted.arrows == {
        (config, plan), (runtime, plan), (runtime, kernels), (kernels, runtime),
    }  # fmt: skip
    assert counted.two_way == [(runtime, kernels)]
    assert counted.findings == [f"{runtime} and {kernels} import each other"]


def test_places_are_names_and_strings_of_code(structure, tmp_path):
    root = package(
        tmp_path,
        a='"""Of gather."""\n',
        b='NAMES = ("ring", "gather")\n',
        c="def gathered() -> None: ...\n",
        d="from megatron_nsp.x import Gather\n",
    )
    found = structure.places(structure.read_package(root), "gather|Gather")
    assert found == ["megatron_nsp/b.py", "megatron_nsp/d.py"]


def test_every_example_of_a_change_is_somewhere(structure):
    sources = structure.read_package(ROOT)
    for kind, example in structure.EXAMPLES.items():
        assert structure.places(sources, example), kind


def test_structure_refuses_to_count_nothing(structure, tmp_path):
    with pytest.raises(ValueError, match="no Python file below"):
        structure.read_package(tmp_path)
