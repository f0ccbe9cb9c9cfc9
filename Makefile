# Each target does its own set-up: the environment in .venv is made the first time, and again when pyproject.toml changes.
# `make test VENV=` takes the python3 and the tools on the PATH as they are instead, and installs nothing.

VENV := .venv
BIN := $(VENV:%=%/bin/)
READY := $(VENV:%=%/.ready)
# At most four processes, and no more than there are cores.
TOGETHER := -n logical --maxprocesses 4 --dist loadfile
# Random runs of `make fuzz`, and the seed of the first: `make fuzz SEED=1234 DRAWS=1` is one of them again.
DRAWS ?= 2000
SEED ?= 0

# The first of these that is there and is 3.11 or newer.
PYTHON := $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: run test test-long test-slow fuzz clean
.DELETE_ON_ERROR:

# Trains a small model on real text under a device budget that its states do not fit, and leaves a record in runs/.
run: $(READY)
	$(BIN)python3 -m harness run --system elixir --model opt-tiny --device cpu --device-memory 6MiB

# All tests of a file in one process. The last lines say what was skipped and why.
test: $(READY)
	$(BIN)ruff check .
	$(BIN)mypy
	$(BIN)lint-imports
	$(BIN)python3 -m pytest $(TOGETHER)

# Those of tens of seconds each: whole programs, killed processes, packages that build themselves at their first use.
test-long: $(READY)
	$(BIN)python3 -m pytest -m "long and not slow" $(TOGETHER)

test-slow: $(READY)
	$(BIN)python3 -m pytest -m slow

# Random runs of every strategy beside resident, on all cores.
fuzz: $(READY)
	$(BIN)python3 -m pytest tests/systems/test_fuzz.py -k random_loop -m "slow or not slow" -q -n logical --maxprocesses $(DRAWS) --draws $(DRAWS) --seed $(SEED)

$(READY): pyproject.toml constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, none was found" >&2; exit 1; }
	test -x $(BIN)python3 || $(PYTHON) -m venv $(VENV)
	$(BIN)python3 -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	touch $@

# Records in results/ and runs/ stay: they are data.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
