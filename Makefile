# Targets for people; `make help` lists them.  Everything happens in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PACKAGES := $(patsubst %/py.typed,%,$(wildcard */py.typed))
export PATH := $(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help dev demo test lint bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## */\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.demo  ## set up, and do the main jobs on the example model
	rm -rf demo-out/demo
	examples/demo.sh demo-out/demo

test: $(VENV)/.dev  ## set up, and run the tests
	pytest

lint: $(VENV)/.dev  ## ruff and mypy --strict
	ruff check .
	ruff format --check .
	MYPYPATH=build/ns mypy $(foreach p,$(PACKAGES),-p bel.$(p))

bench: $(VENV)/.dev  ## measure against cp, cat and others (long, and much disk)
	python tests/bench/bench_repack.py
	python tests/bench/bench_record.py
	python tests/bench/bench_simulate.py
	python tests/bench/bench_pager.py
	python tests/bench/bench_run.py

dev: $(VENV)/.dev  ## set up everything for work on the project

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is %s; set PYTHON=" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@mkdir -p build/ns/bel
	@for p in $(PACKAGES); do ln -sfn ../../../$$p build/ns/bel/$$p; done
	@touch $@ $(VENV)/.demo

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist demo-out bench-out *.egg-info
