"""The page of a training log: what the lines `nsp step ...` say, over the steps."""

import re

from megatron_nsp.report import svg

_FIELDS = {
    "predicted": (r"predicted: ([\d.]+) ms", "predicted step", "ms"),
    "imbalance": (r"imbalance: ([\d.]+)", "predicted imbalance", ""),
    "tokens": (r"\| tokens: (\d+)", "tokens", ""),
    "samples": (r"\| samples: (\d+)", "samples", ""),
    "waited": (r"waited ([\d.]+) ms", "waiting for plans", "ms"),
    "exposed": (r"exposed in step \d+: ([\d.]+) ms", "exposed communication, last rank", "ms"),
}
_LOSS = re.compile(r"lm loss: ([-+.\dEe]+)")
_DRAWN = re.compile(r"epoch: (\d+), documents drawn: (\d+)")
_STEP = re.compile(r"^nsp step (\d+)", re.MULTILINE)


def log_page(log: str) -> str:
    """The page.

    Args:
        log: the text of the log.

    Raises:
        ValueError: it has no line of a step.
    """
    lines = [line for line in log.splitlines() if line.startswith("nsp step ")]
    if not lines:
        raise ValueError("there is no line `nsp step ...` in this log")
    curves = []
    for pattern, label, unit in _FIELDS.values():
        found = [re.search(pattern, line) for line in lines]
        values = [float(match[1]) for match in found if match]
        if values:
            curves.append((label, svg.curve(values, 110, label, unit)))
    losses = [float(match) for match in _LOSS.findall(log)]
    if losses:
        curves.insert(0, ("loss", svg.curve(losses, 110, "lm loss", "")))
    drawn = [match for line in lines if (match := _DRAWN.search(line))]
    left_out = [line for line in lines if "left out" in line or "carried" in line]
    rows = [
        ("steps", f"{len(lines)}"),
        ("first and last", f"{_STEP.findall(log)[0]} to {_STEP.findall(log)[-1]}"),
        *(
            [("epoch and documents drawn at the end", f"{drawn[-1][1]}, {drawn[-1][2]}")]
            if drawn
            else []
        ),
        ("steps that left samples out or carried some", f"{len(left_out)}"),
    ]
    return svg.page("Training log", [("Summary", svg.table(("", ""), rows)), *curves])
