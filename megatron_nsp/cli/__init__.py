"""The command line: `megatron-nsp COMMAND ...`.

Each command is a module with `add_arguments(parser)` and `run(args) -> exit status`. Only the
module of the command that was asked for is imported, so that planning needs neither torch nor
Megatron.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "profile": "measure this machine, or the GPUs and network of a torchrun job",
    "plan": "plan a batch of sample lengths and say what nesting would gain",
    "report": "draw a plan or a training log as one HTML page",
    "simulate": "compare policies over many batches in a simulated cluster",
    "verify": "check on this machine that nested attention equals plain attention",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program's name; None = that of the process.

    Returns:
        The exit status; 2 for anything the user can mend, told in one line on standard error.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="megatron-nsp", description="Nested sequence parallelism for Megatron-Core."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    run = None
    for name, summary in COMMANDS.items():
        command_parser = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            module = import_module(f"megatron_nsp.cli.{name}")
            module.add_arguments(command_parser)
            run = module.run
    args = parser.parse_args(words)
    assert run is not None, f"{args.command=} {chosen=}"
    try:
        status = int(run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        print(f"megatron-nsp {args.command}: error: {error}", file=sys.stderr)
        return 2
