"""Counts what a reader of the package has to hold in mind, and fails where the house rules break.

    python scripts/structure.py [--root CHECKOUT] [--arrows]

    rooms, arrows    folders (and modules beside them), and pairs of which one imports the other
    two-way pairs    rooms that import each other: none
    typed            functions with every argument and the result annotated: all
    documented       public modules, classes, functions and methods with a docstring, or marked
                     `override` where the docstring is the base's: all
    banned words     parts of names that say nothing: none
    places           files that name one example of each kind of change: what adding one more takes

Folders are counted apart from the folders they contain. Exits 1 if a rule is broken.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_nsp"
BANNED_WORDS = {"mgr", "util", "utils", "helper", "helpers", "misc", "tmp"}

EXAMPLES = {
    "backend": r"gather|Gather",
    "kernel": r"flash-attn-2|flash_attn2|FlashAttn2\w*",
    "policy": r"two-level|two_level|place_two_level",
    "cost term": r"merged_elements_per_s",
    "Megatron flag": r"moe_input_jitter_eps|--moe-input-jitter-eps",
}
"""What is looked for in names and strings of the code, docstrings left out."""

# the words of snake_case, CamelCase and HTTPServer names
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def banned_words(name: str) -> list[str]:
    """The banned words that `name` is made of, in their order."""
    return [word for word in map(str.lower, _WORD.findall(name)) if word in BANNED_WORDS]


@dataclass(frozen=True)
class Source:
    """One parsed file.

    Attributes:
        path: relative to the folder that holds the package.
        module: its dotted name.
        room: dotted name of its folder, or of itself beside the package's folders.
        tree: its syntax.
    """

    path: Path
    module: str
    room: str
    tree: ast.Module

    @classmethod
    def read(cls, root: Path, path: Path) -> "Source":
        """Parses a file below `root`."""
        inside = path.relative_to(root)
        parts = inside.with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        room = ".".join(parts[:-1]) if len(parts) > 2 or is_package else module
        return cls(inside, module, room, ast.parse(path.read_text(encoding="utf-8")))

    def imports(self) -> Iterator[tuple[str, list[str]]]:
        """Modules of the package that the file imports, with the names taken from them."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                yield node.module or "", [alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith(PACKAGE):
                        yield alias.name, []

    def functions(self) -> Iterator[tuple[Function, str, bool]]:
        """Every function with its name inside the module, and whether it is public."""
        yield from _functions(self.tree, "", True)

    def is_told(self, pattern: re.Pattern[str]) -> bool:
        """Whether a name or a string of the code, docstrings left out, matches as a whole word."""
        texts = {
            id(node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(self.tree):
            names: list[str] = []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value] if id(node) not in texts else []
            elif isinstance(node, ast.Name):
                names = [node.id]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.alias | ast.ClassDef | Function):
                names = [node.name]
            elif isinstance(node, ast.arg | ast.keyword):
                names = [node.arg or ""]
            if any(pattern.search(name) for name in names):
                return True
        return False


def _functions(node: ast.AST, prefix: str, is_public: bool) -> Iterator[tuple[Function, str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            shown = is_public and not child.name.startswith("_")
            if isinstance(child, ast.ClassDef):
                yield from _functions(child, f"{name}.", shown)
            else:
                yield child, name, shown
                yield from _functions(child, f"{name}.", False)
        else:
            yield from _functions(child, prefix, is_public)


def is_typed(function: Function) -> bool:
    """Whether every argument but self and cls, and the result, has an annotation."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [each for each in (arguments.vararg, arguments.kwarg) if each]
    return function.returns is not None and all(
        each.annotation is not None or each.arg in ("self", "cls") for each in named
    )


def is_documented(node: ast.AST) -> bool:
    """Whether a definition has a docstring, or takes that of the method it overrides."""
    assert isinstance(node, ast.Module | ast.ClassDef | Function)
    if ast.get_docstring(node):
        return True
    marks = getattr(node, "decorator_list", [])
    names = {getattr(mark, "id", getattr(mark, "attr", None)) for mark in marks}
    return bool(names & {"override", "overload", "setter"})


@dataclass
class Structure:
    """What was counted, and the findings: `path:line: what is wrong`."""

    rooms: set[str] = field(default_factory=set)
    arrows: set[tuple[str, str]] = field(default_factory=set)
    num_functions: int = 0
    num_typed: int = 0
    num_public: int = 0
    num_documented: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def two_way(self) -> list[tuple[str, str]]:
        """Rooms that import each other."""
        return sorted((a, b) for a, b in self.arrows if a < b and (b, a) in self.arrows)

    def add(self, source: Source, modules: dict[str, Source]) -> None:
        """Counts one file."""
        self.rooms.add(source.room)
        for module, names in source.imports():
            for name in names or [""]:
                target = modules.get(f"{module}.{name}") or modules.get(module)
                if target is not None and target.room != source.room:
                    self.arrows.add((source.room, target.room))
        for word in (
            word for part in source.path.with_suffix("").parts for word in banned_words(part)
        ):
            self.findings.append(f"{source.path}:1: banned word {word!r} in the module name")
        self._add_definitions(source)

    def _add_definitions(self, source: Source) -> None:
        public: list[tuple[ast.AST, str]] = [(source.tree, "the module")]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef | Function):
                self.findings += [
                    f"{source.path}:{node.lineno}: banned word {word!r} in {node.name}"
                    for word in banned_words(node.name)
                ]
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                public.append((node, node.name))
        for function, name, is_public in source.functions():
            self.num_functions += 1
            self.num_typed += is_typed(function)
            if not is_typed(function):
                self.findings.append(f"{source.path}:{function.lineno}: {name} is not typed")
            if is_public:
                public.append((function, name))
        for node, name in public:
            self.num_public += 1
            self.num_documented += is_documented(node)
            if not is_documented(node):
                line = getattr(node, "lineno", 1)
                self.findings.append(f"{source.path}:{line}: {name} has no docstring")


def read_package(root: Path) -> list[Source]:
    """All files of the package below `root`.

    Raises:
        ValueError: there are none.
    """
    paths = sorted((root / PACKAGE).rglob("*.py"))
    if not paths:
        raise ValueError(f"no Python file below {root / PACKAGE}")
    return [Source.read(root, path) for path in paths]


def measure(sources: list[Source]) -> Structure:
    """Counts the package."""
    modules = {source.module: source for source in sources}
    structure = Structure()
    for source in sources:
        structure.add(source, modules)
    structure.findings += [f"{a} and {b} import each other" for a, b in structure.two_way]
    return structure


def places(sources: list[Source], example: str) -> list[str]:
    """Files whose code names an example."""
    pattern = re.compile(rf"\b({example})\b")
    return [str(source.path) for source in sources if source.is_told(pattern)]


def main(arguments: list[str] | None = None) -> int:
    """Prints the counts and the findings; returns the exit status."""
    parser = argparse.ArgumentParser(description="count the package's structure")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (this one)")
    parser.add_argument("--arrows", action="store_true", help="list arrows and places as well")
    args = parser.parse_args(arguments)
    sources = read_package(args.root)
    structure = measure(sources)
    print(f"rooms            {len(structure.rooms)}, {len(sources)} files")
    print(f"arrows           {len(structure.arrows)}")
    print(f"two-way pairs    {len(structure.two_way)}")
    print(f"typed            {structure.num_typed} of {structure.num_functions} functions")
    print(f"documented       {structure.num_documented} of {structure.num_public} public names")
    for kind, example in EXAMPLES.items():
        found = places(sources, example)
        print(f"places, {kind:<15} {len(found)}")
        if args.arrows:
            print("".join(f"    {path}\n" for path in found), end="")
    if args.arrows:
        print("".join(f"{a} -> {b}\n" for a, b in sorted(structure.arrows)), end="")
    print("\n".join(structure.findings) or "no rule broken")
    return 1 if structure.findings else 0


if __name__ == "__main__":
    sys.exit(main())
