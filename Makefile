# Everything a contributor runs. Each target sets up .venv by itself and works from a fresh clone.
#   make demo   run every example (on the emulator)
#   make test   the test suite
#   make check  formatting, lint, layering, types, then the tests: what CI runs
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The first interpreter that is new enough; override with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?= -n 2 --dist worksteal -q
PACKAGES := minitriton frontend ir passes codegen runtime examples tests benchmarks
EXAMPLES ?= $(sort $(wildcard examples/*.py)) examples/k3

.PHONY: help setup demo test check lint format layers types clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: pass PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[test,dev,sass]'
	@touch $@

demo: $(STAMP)
	@set -e; for example in $(EXAMPLES); do \
		echo "== $$example"; export CUDA_VISIBLE_DEVICES=; \
		if [ -d $$example ]; then $(BIN)/python -m $${example//\//.}; \
		else $(BIN)/python $$example; fi; done
	@echo "$(words $(EXAMPLES)) examples ran"

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: lint layers types test

lint: $(STAMP)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/ruff check $(PACKAGES)

format: $(STAMP)
	$(BIN)/ruff format $(PACKAGES)
	$(BIN)/ruff check --fix $(PACKAGES)

layers: $(STAMP)
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
