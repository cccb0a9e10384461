# `make grpo` trains a real language model on the CPU; `make test` runs every test. Each first installs what is missing.
# Variables: ARGS (passed on to the command), PYTHON (the interpreter that makes .venv), STACK (--cpu or --cuda).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV := .venv
ARGS ?=
STACK ?=
BIN := $(VENV)/bin
# The name of the stamp changes with what is to be installed, so a changed lock file installs again.
INSTALL_FILES := $(sort $(wildcard requirements/*.txt)) pyproject.toml scripts/install.sh scripts/install_common.sh
STAMP := $(VENV)/.installed-$(shell (cat $(INSTALL_FILES); echo "$(STACK)") | sha256sum | cut -c1-12)
BENCH_STAMP := $(STAMP)-bench
# Left behind only by an install that was cut short (power, signal).
UNFINISHED := $(VENV)/.installing
TESTS := $(wildcard tests/unit tests/integration tests/reliability tests/gpu)
# Two workers, each a file at a time, since the tests of a file may share what they start; unit tests first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations-min=1

# The search for an interpreter must not find the one of a broken environment.
OUTER_PATH := $(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)

.PHONY: help install grpo sft sft-grpo test test-unit lint format bench clean distclean

help:
	@echo 'make grpo       install what is missing, then train SmolLM2-135M with GRPO on the CPU'
	@echo '                (make grpo ARGS="--training.steps 5" passes overrides on)'
	@echo 'make sft        the same for supervised fine-tuning; make sft-grpo: that first, then GRPO of what it made'
	@echo 'make test       install what is missing, then run every test; make test-unit: the quick ones'
	@echo 'make lint       style and types'
	@echo 'make bench      the benchmarks'
	@echo 'make clean      remove caches; make distclean: and the environment'

install: $(STAMP)

grpo: $(STAMP)
	$(BIN)/python scripts/fetch_model.py
	$(BIN)/python -m apps.grpo.main --config apps/grpo/smollm2_135m.yaml $(ARGS)

sft: $(STAMP)
	$(BIN)/python scripts/fetch_model.py
	$(BIN)/python -m apps.sft.main --config apps/sft/smollm2_135m.yaml $(ARGS)

# Fine-tuning teaches the format, on so few sums that answers still differ; GRPO raises the accuracy. Its config,
# apps/grpo/smollm2_after_sft.yaml, starts from the folder of the first.
sft-grpo: $(STAMP)
	$(BIN)/python scripts/fetch_model.py
	$(BIN)/python -m apps.sft.main --config apps/sft/smollm2_135m.yaml --output_dir runs/sft-grpo/sft \
	  --training.steps 8 --dataset.parameters.max_terms 3 --dataset.parameters.max_digits 1
	$(BIN)/python -m apps.grpo.main --config apps/grpo/smollm2_after_sft.yaml --output_dir runs/sft-grpo/grpo $(ARGS)

test: $(STAMP)
	$(PYTEST) --durations=15 $(TESTS) $(ARGS)

test-unit: $(STAMP)
	$(PYTEST) --durations=10 tests/unit $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_STAMP)
	$(BIN)/python scripts/fetch_model.py
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find apps benchmarks scripts src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)

# An environment whose last install was cut short is made anew, since half-written packages look installed to pip.
$(STAMP):
	@if [ -e $(UNFINISHED) ]; then echo '[install] the last install was cut short: starting $(VENV) afresh'; rm -rf $(VENV); fi
	@if ! $(BIN)/python -c '' >/dev/null 2>&1; then \
	  export PATH="$(OUTER_PATH)"; chosen=''; \
	  for candidate in $(if $(PYTHON),'$(PYTHON)',python3.11 python3.12 python3 python); do \
	    if $$candidate -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1; \
	    then chosen=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$chosen" ]; then \
	    echo "error: $(or $(PYTHON),no Python found) $(if $(PYTHON),is not usable): forge needs Python 3.11 or 3.12 with its venv module." \
	      "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; \
	  fi; \
	  echo "[install] making $(VENV) with $$($$chosen --version)"; \
	  rm -rf $(VENV); mkdir -p $(VENV); touch $(UNFINISHED); $$chosen -m venv $(VENV); \
	fi
	@touch $(UNFINISHED)
	@PYTHON=$(BIN)/python scripts/install.sh --dev $(STACK)
	@rm -f $(VENV)/.installed-*; touch $@; rm -f $(UNFINISHED)

$(BENCH_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/bench.txt
	@touch $@
