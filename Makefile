# Each target does its own set-up: the environment in .venv is made the first time, and again when pyproject.toml changes.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The first of these that is there and is 3.11 or newer.
PYTHON := $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: run test test-slow clean
.DELETE_ON_ERROR:

# Trains a small model on real text under a device budget that its states do not fit, and leaves a record in results/.
run: $(READY)
	$(BIN)/harness run --system elixir --model opt-tiny --device cpu --device-memory 6MiB

# A process for each core, up to four, and all tests of a file in one.
test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

$(READY): pyproject.toml constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, none was found" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	touch $@

# Records in results/ stay: they are data.
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
