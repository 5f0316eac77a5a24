# make install   .venv with the package and what its tests need
# make test      the tests
# make train     the main job: a small LLaMA on long sequences, ARGS="..." for its options
# make check     ruff and mypy, as CI runs them
# make docs      the documentation site, in site/; make docs-serve shows it and builds it again at each change

PYTHON ?= python3
# Processes that run tests, each a file at a time; 0: this one. Many tests have several ranks themselves.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
BMTRAIN := bmtrain==1.0.1
MODEL_CENTER := model-center==1.0.2

.PHONY: install test train check docs docs-serve clean

install: $(VENV)/installed

$(VENV)/installed: setup.py constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "torch>=2.11" "numpy>=1.26" setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	$(BIN)/python -m bmburst.runtime.install_bmtrain
	$(BIN)/pip install --quiet --no-deps --no-build-isolation $(MODEL_CENTER)
	touch $@

test: install
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

train: install
	$(BIN)/bmburst train $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/python -m docs.tools.figures
	$(BIN)/python -m mkdocs build --strict

docs-serve: install
	$(BIN)/python -m mkdocs serve

clean:
	rm -rf $(VENV) site build dist *.egg-info
