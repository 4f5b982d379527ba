# Every target makes or refreshes .venv first; that takes well under a second when nothing changed.
# What CI runs is `make test` (.ci/run); run `make check` before a commit.

PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
SUITES := tests/unit tests/dist tests/mcore tests/examples tests/patches

# Ranks share the cores of one machine: more threads than that only fight each other.
export OMP_NUM_THREADS := 1

TARGETS := demo test check format format-check lint types unit dist mcore examples patches matrix bench
TARGETS += extras gpu
.PHONY: setup te clean $(TARGETS)

setup:
	@bash scripts/setup.sh

$(TARGETS): setup

demo:
	$(PYTHON) examples/cpu/demo.py

test:
	$(PYTEST) $(SUITES) --durations=15 -m "not matrix"

# All cells of the matrix of settings, of which `make test` runs a dozen.
matrix:
	$(PYTEST) tests/mcore/test_matrix.py

unit dist mcore examples patches:
	$(PYTEST) tests/$@ -m "not matrix"

check: format-check lint types unit dist

format:
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

format-check:
	.venv/bin/ruff format --check .

lint:
	.venv/bin/ruff check .
	.venv/bin/codespell
	.venv/bin/lint-imports --no-logo
	$(PYTHON) scripts/structure.py

types:
	.venv/bin/mypy

# Asks the package index whether each extra installs together with megatron-core; installs nothing.
extras:
	for extra in dev milp viz te; do \
	    $(PYTHON) -m pip install --dry-run --quiet ".[$$extra]" && echo "$$extra resolves" || exit 1; \
	done
	$(PYTHON) -m pip install --dry-run --quiet --no-build-isolation ".[flash]" && echo flash resolves

bench:
	$(PYTHON) benchmarks/run.py

# What one GPU proves and measures in under five minutes; says so where there is none.
gpu:
	$(PYTHON) benchmarks/gpu.py

# Our kernels against the real Python of Transformer Engine and flash-attn, no GPU needed. The first
# call builds Transformer Engine into .te-venv, which takes about 20 minutes and a CUDA 13 toolkit.
te:
	@bash scripts/te_venv.sh
	.te-venv/bin/python -m pytest tests/te

# .venv and .te-venv stay: `rm -rf .venv .te-venv` removes them.
clean:
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
