"""`megatron-nsp report`: one self-contained HTML page about a plan or a training log."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the command."""
    parser.add_argument("source", help="what `megatron-nsp plan --json` printed, or a training log")
    parser.add_argument("output", help="the page to write, an .html file")


def run(args: argparse.Namespace) -> int:
    """Reads, draws and writes.

    Raises:
        ValueError: the source is neither; one line naming it.
    """
    from megatron_nsp.report import log_page, plan_page

    source, output = Path(args.source), Path(args.output)
    if not output.parent.is_dir():
        raise ValueError(f"{output}: there is no folder {output.parent}")
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {source}: {error}") from error
    try:
        html = plan_page(_parsed(text)) if text.lstrip().startswith("{") else log_page(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    output.write_text(html, encoding="utf-8")
    print(f"wrote {output}")
    return 0


def _parsed(text: str) -> dict:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    assert isinstance(data, dict), "it starts with a brace"
    return data
