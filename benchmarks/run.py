"""Runs the benchmarks that need nothing but this checkout, one after the other: `make bench`.

Each prints what it measured and exits 1 when it misses its target. Run by hand: flexsp.py (needs
the trace of FlexSP's artifact), calibration.py, streaming.py and nested_pays.py (need root),
balancing.py (trains for minutes), paper.py (simulates for minutes, and for hours with FlexSP).
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BENCHMARKS = ("planner.py", "basp.py", "backends.py", "overhead.py")


def main() -> int:
    """Runs all of them, also after a miss; 0 when none missed its target."""
    missed = []
    for name in BENCHMARKS:
        print(f"== benchmarks/{name}", flush=True)
        if subprocess.run([sys.executable, str(FOLDER / name)], check=False).returncode:
            missed.append(name)
    print(f"missed a target: {', '.join(missed)}" if missed else "every target was met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
