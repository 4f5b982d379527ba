"""Writes the table of refusals into a page, between two marks.

python -m megatron_nsp.mcore.limits_page docs/limits.md
"""

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from megatron_nsp.mcore.page import cell, with_section
from megatron_nsp.mcore.refusal import Refusal
from megatron_nsp.mcore.refusals import KERNEL_REFUSALS, REFUSALS

BEGIN = "<!-- written by python -m megatron_nsp.mcore.limits_page; change refusals.py instead -->"


def refusals_section() -> str:
    """The refusals by topic, a table for each, as Markdown."""
    topics = {**REFUSALS, "Kernels": KERNEL_REFUSALS}
    return "\n\n".join("\n".join(_topic(name, rows)) for name, rows in topics.items())


def _topic(name: str, rows: Sequence[Refusal]) -> Iterator[str]:
    yield f"### {name}\n"
    yield "| flag | what it says | why |"
    yield "|---|---|---|"
    # Rows that say the same of flag after flag are one line.
    for (says, reason), alike in groupby(rows, lambda row: (_says(row), row.reason)):
        flags = ", ".join(f"`{row.flag}`" for row in alike)
        yield f"| {flags} | `{cell(says)}` | {cell(reason)} |"


def _says(row: Refusal) -> str:
    """A message without its flag at the head, and with dots where the values of a job stand."""
    return re.sub(r"{[^}]*}", "...", row.message).removeprefix(row.flag).strip()


def with_refusals(page: str) -> str:
    """A page with the table between its marks.

    Raises:
        ValueError: the page has not both marks, once each.
    """
    return with_section(page, BEGIN, refusals_section())


def main(path: str) -> None:
    """Writes the table into the page at `path`."""
    page = Path(path)
    page.write_text(with_refusals(page.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
