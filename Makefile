# Each target does its own set-up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The lowest versions that pyproject.toml allows, in an environment of their own.
LOWEST := $(VENV)/lowest
# Test processes: one more than a machine of two cores has, because a third of a run is waiting for processes and stores.
JOBS ?= 3
# How long `make fuzz` looks for inputs that break a parser, and then for examples that break a property; it ends with
# the round that began before that.
SECONDS ?= 600
# Tests start hundreds of processes: without bytecode each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# uv takes a tenth of pip's time; where it finds no index (settings that pip alone reads), pip installs.
comma := ,
install = $(BIN)/python -m pip install --quiet uv && \
  { $(BIN)/uv pip install --quiet --python $(BIN)/python --editable "$(1)" || $(BIN)/python -m pip install --quiet --editable "$(1)"; }
# Where `make docs` puts the site.
SITE := build/docs
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: check lint test docs outputs test-fast test-lowest fuzz demo bench dist smoke clean

# The gate, locally and in CI. Linters and documentation use the time in which tests wait.
check: $(VENV)/.check-installed
	$(MAKE) --jobs=2 test lint docs

lint: $(VENV)/.lint-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m tests.support.typed_pages

# The same examples in every run.
test: $(VENV)/.bytecode
	$(PYTEST)

# The documentation's site, without a network: any warning, broken link or anchor is an error. The tests run its examples.
docs: $(VENV)/.docs-installed
	rm -rf $(SITE)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir build/doctrees docs $(SITE)
	$(BIN)/python docs/check_site.py $(SITE)

# Writes the outputs that pages show, where they are no longer the real ones.
outputs: $(VENV)/.tests-installed
	WRITE_OUTPUTS=1 $(BIN)/python -m pytest -q tests/house/test_docs.py tests/house/test_docs_command_line.py \
	  tests/house/test_readme.py
	$(BIN)/python docs/run_examples.py
	$(BIN)/python docs/plots.py

# One case of each test that starts no process and takes no third of a second: for whoever changes one thing, before the
# whole. It waits for nothing, and each process collects all tests: as many as a machine of two cores has.
test-fast: JOBS = 2
test-fast: $(VENV)/.bytecode
	$(PYTEST) --fast

# The same as `test` with the lowest version of each package that pyproject.toml names; of others, what those allow.
test-lowest: $(LOWEST)/.tests-installed
	$(LOWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# New random inputs in every run: half of the time for the parsers, half for the properties.
fuzz: $(VENV)/.fuzz-installed
	$(BIN)/python -m tests.fuzz --seconds $$(( $(SECONDS) / 2 )) $(if $(KEEP),--keep $(KEEP))
	@end=$$(( $$(date +%s) + $(SECONDS) / 2 )); while [ $$(date +%s) -lt $$end ]; do \
	  $(PYTEST) --quiet --hypothesis-profile=fuzz --timeout=3600 -m hypothesis || exit 1; \
	done

demo: $(VENV)/.installed
	$(BIN)/orbax-t5x demo

# The files of a release, checked; `make smoke` does the whole job with the wheel in a new environment.
dist: $(VENV)/.release-installed
	.ci/dist $(abspath $(BIN)/python)

smoke: dist
	.ci/smoke dist/*.whl $(abspath $(BIN)/python)

bench: $(VENV)/.tests-installed
	$(BIN)/python -m benchmarks.run

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(call install,.)
	touch $@

$(VENV)/.tests-installed: pyproject.toml | $(BIN)/python
	$(call install,.[test])
	touch $@ $(VENV)/.installed

# Bytecode of the tests and of what they import: in a new environment each of their processes would compile all of it.
$(VENV)/.bytecode: $(VENV)/.tests-installed
	-$(BIN)/python -m pytest --quiet --collect-only >$@

$(LOWEST)/.tests-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable ".[test]"
	touch $@

# Atheris has wheels for Linux alone.
$(VENV)/.fuzz-installed: $(VENV)/.tests-installed
	$(call install,.[test$(comma)fuzz])
	touch $@

$(VENV)/.lint-installed: $(VENV)/.tests-installed
	$(call install,.[test$(comma)lint])
	touch $@

$(VENV)/.docs-installed: pyproject.toml | $(BIN)/python
	$(call install,.[docs])
	touch $@ $(VENV)/.installed

# All that the gate needs, found at once.
$(VENV)/.check-installed: pyproject.toml | $(BIN)/python
	$(call install,.[test$(comma)lint$(comma)docs])
	touch $(VENV)/.installed $(VENV)/.tests-installed $(VENV)/.lint-installed $(VENV)/.docs-installed $@

$(VENV)/.release-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "build>=1.2" "twine>=6"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
