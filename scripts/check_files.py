"""Holds every Python file below the given folders to the project's limits on size and names.

Limits: 400 lines a file, 60 lines a function (signature and docstring included), and no banned
word as a part of the name of a module, class or function. Usage: ``check_files.py FOLDER...``;
prints one line per finding and exits 1 if there is any.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BANNED_WORDS = {"mgr", "util", "utils", "helper", "helpers", "misc", "tmp"}

# the words of snake_case, CamelCase and HTTPServer names
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def banned_words(name: str) -> list[str]:
    """Returns the banned words that ``name`` is made of, in their order."""
    return [word for word in map(str.lower, _WORD.findall(name)) if word in BANNED_WORDS]


def check_source(path: Path, source: str) -> Iterator[str]:
    """Yields one ``path:line: finding`` for each broken limit in ``source``.

    Args:
        path: Where the source lies; its folders and stem are module names and checked too.
        source: Python text.
    """
    for word in (word for part in path.with_suffix("").parts for word in banned_words(part)):
        yield f"{path}:1: banned word {word!r} in the module name"
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}:{num_lines}: {num_lines} lines in the file, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source, str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        where = f"{path}:{node.lineno}"
        for word in banned_words(node.name):
            yield f"{where}: banned word {word!r} in {node.name}"
        assert node.end_lineno is not None
        num_lines = node.end_lineno - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES and not isinstance(node, ast.ClassDef):
            yield f"{where}: {num_lines} lines in {node.name}, at most {MAX_FUNCTION_LINES}"


def main(folders: list[str]) -> int:
    """Prints the findings below ``folders`` and returns the exit status.

    Raises:
        ValueError: A folder holds no Python file, so that nothing would be checked.
    """
    findings = []
    for folder in folders:
        paths = sorted(Path(folder).rglob("*.py"))
        if not paths:
            raise ValueError(f"no Python file below {folder!r}")
        for path in paths:
            findings.extend(check_source(path, path.read_text(encoding="utf-8")))
    print("\n".join(findings) or f"check_files: {', '.join(folders)} within limits")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
