# make train ARGS="steps=20"   train; ARGS are Hydra overrides, RECIPE=ci_tiny takes another recipe
# make test                    all tests; TESTS="tests/trainer -k advantage" takes some, TESTS="-m 'not engine'" the quick ones, TESTS="-n 0" in one process
# make lint | format           what CI checks | what can be repaired by itself
# make docs                    the documentation as a site in site/, every link checked
# make lock                    requirements/*.lock from pyproject.toml; LOCK="--upgrade cpu" for newer versions of one
# make clean | distclean       caches and build products | the virtual environment too

VENV := $(or $(MIDFLIGHT_VENV),.venv)
PYTHON := $(abspath $(VENV))/bin/python
DOCS_VENV := $(or $(MIDFLIGHT_DOCS_VENV),.venv-docs)
RECIPE ?= gsm8k_fully_async

# What runs from here finds the tools of the environment (ninja, ray), as it would in an activated one.
export PATH := $(abspath $(VENV))/bin:$(PATH)

# `make train steps=5` would train with the recipe's own number of steps, and nobody would notice.
KNOWN := ARGS RECIPE TESTS LOCK MIDFLIGHT_% VENV DOCS_VENV PYTHON MAKE%
UNKNOWN := $(filter-out $(KNOWN),$(foreach v,$(.VARIABLES),$(if $(findstring command,$(origin $(v))),$(v))))
ifneq ($(strip $(UNKNOWN)),)
$(error make knows no variable $(UNKNOWN); overrides go into ARGS, as in: make train ARGS="steps=5")
endif

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format docs lock clean distclean

help:
	@sed -n 's/^# //p' Makefile | head -n 6

setup:
	@MIDFLIGHT_VENV="$(VENV)" scripts/setup

# exec: Ctrl-C, and the exit code, are between make and the trainer, with no shell in the middle.
train: setup
	@exec $(PYTHON) -m trainer recipe=$(RECIPE) $(ARGS)

test: setup
	@exec $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

lint: setup
	ruff check
	ruff format --check
	mypy
	lint-imports --no-logo

format: setup
	ruff check --fix
	ruff format

# Thirty small packages of their own: nothing of what trains is needed to build the pages. Not --quiet: mkdocs counts no
# warning then, and --strict lets everything pass.
DOCS_PYTHON = $(firstword $(foreach p,$(MIDFLIGHT_PYTHON) python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
docs: $(DOCS_VENV)/stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/stamp: requirements/docs.lock
	$(DOCS_PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --no-deps --disable-pip-version-check -r requirements/docs.lock
	@touch $@

lock: setup
	@exec $(PYTHON) scripts/lock $(LOCK)

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf "$(VENV)" "$(VENV).lock" "$(VENV).unfinished" "$(DOCS_VENV)"
