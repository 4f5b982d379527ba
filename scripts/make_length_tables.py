"""Makes the quantile tables of sample lengths that ship with the package.

A table holds points (survival, length): the share of samples longer than `length` is `survival`.
The points lie one hundredth apart down to 0.02, then sixteen to a decade, so that the rare long
samples are drawn faithfully; readers interpolate the length linearly in the survival between two
points.

Usage: `python scripts/make_length_tables.py TRACE_DIR`, where TRACE_DIR holds `wikipedia.npz` and
`source_code.npz` with an array `lengths`. The third table, `paper-mix`, is synthetic: a lognormal
body (94.0% of samples below 8K tokens) and a Pareto tail (0.12% over 128K), the two points the NSP
paper (arXiv 2609.22755, section 3.1) publishes about its traces.
"""

import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist

import numpy as np

OUTPUT_DIR = Path(__file__).parent.parent / "megatron_nsp" / "steps" / "data" / "lengths"
TRACES = {"wikipedia": "wikipedia.npz", "source-code": "source_code.npz"}
PROVENANCE = {
    "wikipedia": "1,000,000 documents of the wikipedia trace of the FlexSP artifact",
    "source-code": "52,836 source files, bytes / 3.6",
    "paper-mix": "synthetic: lognormal below 8192 tokens (median 1024, sigma 1.4), Pareto above, "
    "through the points 94.0% < 8K and 0.12% > 128K of the NSP paper (arXiv 2609.22755)",
}

BODY_SHARE, BODY_END, BODY_MEDIAN, BODY_SIGMA = 0.940, 8192, 1024, 1.4
TAIL_SHARE, TAIL_POINT, TAIL_END = 0.0012, 131072, 1048576


def survival_grid(smallest: float) -> list[float]:
    """Survivals from 1 down to `smallest`, finer in the tail."""
    grid = [1 - i / 100 for i in range(99)]
    step = 0
    while (survival := 0.02 * 10 ** (-(step + 1) / 16)) > smallest:
        grid.append(survival)
        step += 1
    return [*grid, smallest, 0.0]


def trace_length(lengths: np.ndarray, survival: float) -> int:
    """The length that a share `survival` of the trace exceeds; `lengths` is sorted ascending."""
    place = (1 - survival) * (len(lengths) - 1)
    return round(float(np.interp(place, np.arange(len(lengths)), lengths)))


def mix_length(survival: float) -> int:
    """The length that a share `survival` of the synthetic mix exceeds."""
    tail_start = 1 - BODY_SHARE
    if survival >= tail_start:
        normal = NormalDist(math.log(BODY_MEDIAN), BODY_SIGMA)
        share = (1 - survival) / BODY_SHARE * normal.cdf(math.log(BODY_END))
        return max(1, round(math.exp(normal.inv_cdf(share)))) if share > 0 else 1
    exponent = math.log(tail_start / TAIL_SHARE) / math.log(TAIL_POINT / BODY_END)
    if survival <= 0:
        return TAIL_END
    return min(TAIL_END, round(BODY_END * (tail_start / survival) ** (1 / exponent)))


def write_table(name: str, points: list[tuple[float, int]]) -> None:
    """Writes one table as JSON."""
    table = {
        "name": name,
        "provenance": PROVENANCE[name],
        "date": datetime.now(UTC).date().isoformat(),
        "survival": [float(f"{survival:.6g}") for survival, _ in points],
        "length": [length for _, length in points],
    }
    path = OUTPUT_DIR / f"{name}.json"
    path.write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path}: {len(points)} points, {path.stat().st_size} bytes")


def main(arguments: list[str]) -> int:
    """Writes all three tables; returns the exit status."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
    for name, file_name in TRACES.items():
        with np.load(Path(arguments[0]) / file_name) as archive:
            lengths = np.sort(archive["lengths"].astype(np.int64))
        grid = survival_grid(1 / len(lengths))
        write_table(name, [(survival, trace_length(lengths, survival)) for survival in grid])
    # The two published points are points of the table, so that interpolation keeps them exact.
    grid = sorted({*survival_grid(1e-5), 1 - BODY_SHARE, TAIL_SHARE}, reverse=True)
    write_table("paper-mix", [(survival, mix_length(survival)) for survival in grid])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
