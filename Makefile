# `make demo` and `make test` do all their own set-up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes: more than cores only makes them wait for one another.
JOBS ?= 2

.PHONY: demo test lint bench clean

demo: $(VENV)/.installed
	$(BIN)/orbax-t5x demo

test: $(VENV)/.tests-installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.lint-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.tests-installed
	$(BIN)/python -m benchmarks.run

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.tests-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@ $(VENV)/.installed

$(VENV)/.lint-installed: $(VENV)/.tests-installed
	$(BIN)/python -m pip install --quiet --editable ".[test,lint]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
