"""docs/cases.md: every case that tests cite stands there, and what it names as an answer exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ANSWERED, OPEN = (ROOT / "docs/cases.md").read_text().split("\n## Not answered yet\n")
ENTRY = re.compile(r"^- \*\*([A-M]\d+)\. ", re.MULTILINE)
LETTERS = {"A": 4, "B": 4, "C": 5, "D": 4, "E": 4, "F": 4, "G": 3, "H": 3, "I": 4, "J": 4, "K": 3}
NUMBERED = {
    f"{letter}{i}" for letter, last in (LETTERS | {"L": 4}).items() for i in range(1, last + 1)
}


def entries(text: str) -> dict[str, str]:
    """The text of every case."""
    _, *parts = ENTRY.split(text)
    names = parts[::2]
    assert len(set(names)) == len(names), names
    return dict(zip(names, parts[1::2], strict=True))


CASES, OPEN_CASES = entries(ANSWERED), entries(OPEN)


@cache
def functions_of(path: str) -> set[str]:
    """The test functions of a file below tests/."""
    return {
        node.name
        for node in ast.parse((ROOT / "tests" / path).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@cache
def texts_of_the_package() -> tuple[str, ...]:
    """Every string of the package's source, f-strings in the parts between their values."""
    found = []
    for path in (ROOT / "megatron_nsp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def cited_in_tests() -> set[str]:
    """Cases that docstrings and names of tests cite: `Cases A1, B2 and C3`, `test_a1_...`."""
    cited = set()
    paths = sorted((ROOT / "tests").rglob("*.py"))
    assert len(paths) > 50
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.FunctionDef):
                for sentence in re.findall(r"\bCases? [A-M]\d[^.]*", ast.get_docstring(node) or ""):
                    cited |= set(re.findall(r"\b[A-M]\d+\b", sentence))
            if isinstance(node, ast.FunctionDef):
                prefix = re.match(r"test_((?:[a-m]\d{1,2}_)+)", node.name)
                cited |= {name.upper() for name in prefix[1].split("_")[:-1]} if prefix else set()
    return cited


def test_every_case_of_the_tests_stands_on_the_page() -> None:
    cited = cited_in_tests()
    assert {"A1", "B3", "H1", "L4", "G2"} <= cited
    assert cited <= CASES.keys()
    assert CASES.keys() >= NUMBERED and not CASES.keys() & OPEN_CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_what_answers_a_case_exists(name: str) -> None:
    tests = re.findall(r"`(\w+/\w+\.py)::(\w+)`", CASES[name])
    refusals = re.findall(r'`(--[\w-]+)`\s+"([^"]+)"', CASES[name])
    assert tests or refusals
    assert CASES[name].count("::") == len(tests) and CASES[name].count('"') == 2 * len(refusals)
    for path, test in tests:
        assert test in functions_of(path), f"{path}::{test}"
    for _, message in refusals:
        assert any(message in text for text in texts_of_the_package()), message


@pytest.mark.parametrize("name", OPEN_CASES)
def test_what_is_said_of_an_open_case_exists(name: str) -> None:
    for path, test in re.findall(r"`(\w+/\w+\.py)::(\w+)`", OPEN_CASES[name]):
        assert test in functions_of(path), f"{path}::{test}"


def test_a_test_that_carries_the_number_of_a_case_is_named_by_its_entry() -> None:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    for path in paths:
        place = str(path.relative_to(ROOT / "tests"))
        for test in functions_of(place):
            prefix = re.match(r"test_((?:[a-m]\d{1,2}_)+)", test)
            for name in prefix[1].upper().split("_")[:-1] if prefix else []:
                assert f"`{place}::{test}`" in CASES[name], (name, test)
