"""Writes the table of flags into a page, between two marks.

python -m megatron_nsp.mcore.flags_page docs/flags.md
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_nsp.mcore.flags import FLAGS, Flags
from megatron_nsp.mcore.page import cell, with_section

BEGIN = "<!-- written by python -m megatron_nsp.mcore.flags_page; change flags.py instead -->"


def flags_section() -> str:
    """The flags by theme, a table for each, as Markdown."""
    return "\n\n".join("\n".join(_theme(name, groups)) for name, groups in FLAGS.items())


def _theme(name: str, groups: Sequence[Flags]) -> Iterator[str]:
    yield f"### {name}\n"
    yield "| what becomes of it | flags | why |"
    yield "|---|---|---|"
    for group in groups:
        flags = " ".join(f"`{flag}`" for flag in group.names)
        yield f"| {group.fate.value} | {flags} | {cell(group.reason)} |"


def with_flags(page: str) -> str:
    """A page with the table between its marks.

    Raises:
        ValueError: the page has not both marks, once each.
    """
    return with_section(page, BEGIN, flags_section())


def main(path: str) -> None:
    """Writes the table into the page at `path`."""
    page = Path(path)
    page.write_text(with_flags(page.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
