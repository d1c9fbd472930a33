# Everything runs in .venv, which `install` makes; a second run of it costs nothing until pyproject.toml changes.
# With a GPU or vLLM, put the torch build that fits your driver into .venv first and install without the pins:
#   python3 -m venv .venv && .venv/bin/pip install torch && make install CONSTRAINTS= EXTRAS=dev,vllm

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench clean

# The first interpreter that is new enough; each is asked, because a version manager's shim may exist and not run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev
SEED ?= 42
ENGINE ?= transformers
LONG ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
DEMO_CONFIG = examples/configs/demo$(if $(filter-out 0,$(LONG)),_long).yaml

help:  ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10
	@echo
	@echo "Variables: SEED=$(SEED) ENGINE=$(ENGINE) LONG=1 (demo), WORKERS=$(WORKERS) PYTEST_ARGS= (test),"
	@echo "           PYTHON=$(PYTHON) EXTRAS=$(EXTRAS) CONSTRAINTS=$(CONSTRAINTS) (install)"

install: $(STAMP)  ## Make .venv with the package and the developer tools

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into .venv: a few minutes the first time"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[$(EXTRAS)]"
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found: install one or pass PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# One OpenMP thread: so small a model gains little from a second, and loses a lot when another process wants that core.
demo: install  ## Train the embedded model on the CPU; results in outputs/demo (SEED=42 ENGINE=transformers LONG=1)
	OMP_NUM_THREADS=1 $(BIN)/python examples/train_qwen3.py --config $(DEMO_CONFIG) --seed $(SEED) --engine $(ENGINE) --output_dir outputs/demo

# One OpenMP thread per worker: two processes that share two cores run several times slower with more.
test: install  ## Run the unit and the slow tests (no GPU needed, under 10 minutes on two cores)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) $(PYTEST_ARGS)

lint: install  ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install  ## Run every benchmark in benchmarks/; results in outputs/bench
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:  ## Remove caches, builds and outputs (.venv stays)
	rm -rf outputs build dist *.egg-info .coverage htmlcov .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
