# make install   .venv with the package and what its tests need
# make test      the tests
# make test-long those that take longer: all combinations of parameters, pages of the documentation, installing a wheel
#                PART=1/3: a third of them, as CI runs them; the thirds differ
# make test-all  both at once
# make train     the main job: a small LLaMA on long sequences; ARGS="..." for other options of bmburst train
# make check     ruff and mypy, as CI runs them
# make docs      the documentation site, in site/; make docs-serve shows it and builds it again at each change

PYTHON ?= python3
# Processes that run tests; 0: this one. Many tests have several ranks themselves. One that has nothing left to do takes
# tests of another: a fixture of a module is then made in both.
WORKERS ?= 2
SPREAD := --numprocesses $(WORKERS) --dist worksteal
# Activations of 2048 tokens fit; 16 held-out sequences are as much text as 8 of the default length.
MAIN_JOB := --steps 180 --sequence-length 2048 --recompute none --eval-sequences 16
PART ?= 1/1
VENV := .venv
BIN := $(VENV)/bin
BMTRAIN := bmtrain==1.0.1
MODEL_CENTER := model-center==1.0.2

.PHONY: install test test-long test-all train check docs docs-serve clean

install: $(VENV)/installed

$(VENV)/installed: setup.py constraints.txt Makefile
	@echo "installing into $(VENV), once; a few minutes"
	$(PYTHON) -m venv $(VENV)
	@echo "1/4 torch and numpy: the largest download"
	$(BIN)/pip install --quiet --constraint constraints.txt "torch>=2.11" "numpy>=1.26" setuptools
	@echo "2/4 bmburst and what its tests need"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@echo "3/4 BMTrain"
	$(BIN)/python -m bmburst.setup.install_bmtrain
	@echo "4/4 ModelCenter"
	$(BIN)/pip install --quiet --no-deps --no-build-isolation $(MODEL_CENTER)
	touch $@

# Many tests start processes: compiled modules save each of them some tenths of a second.
test test-long test-all: export PYTHONDONTWRITEBYTECODE =

test test-long test-all: install
	$(BIN)/python -m compileall -q -j 2 bmburst bmburst_ops model_center_ext benchmarks
	$(BIN)/python -m pytest $(SPREAD) --part=$(PART) $(WHICH) $(ARGS)

test: WHICH := -m "not long"
test-long: WHICH := -m long

train: install
	$(BIN)/bmburst train $(or $(ARGS),$(MAIN_JOB))

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
