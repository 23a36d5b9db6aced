# Each target installs what it needs, and no more, into $(VENV); only Python 3.11 or newer is assumed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
export MPLBACKEND := Agg

.PHONY: test test-all lint types unit quick thorough compiled demo docs release clean

# Every capability and every law once; test-all adds types, repetitions, features together and the site.
test: lint unit

# Types and pages take the cores that tests leave while they wait for processes.
test-all: test $(VENV)/docs-ready
	$(MAKE) --jobs=3 thorough types docs

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	nice $(BIN)/pyright --warnings --venvpath $(dir $(VENV))

# Tests of a file, or of a shared simulation, use what one of them has set up or compiled.
PYTEST := $(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder

unit: $(VENV)/ready
	$(PYTEST) -m "not thorough"

# For the moment between two edits: the tests of what differs from the last commit (5: there are none).
quick: $(VENV)/ready
	@tests=$$($(BIN)/python tests/support/touched.py) && echo "tests touched: $${tests:-none}" && \
	  { [ -z "$$tests" ] || $(PYTEST) -m "not thorough" $$tests || [ $$? -eq 5 ]; }

thorough: $(VENV)/ready
	$(PYTEST) -m thorough

# Every system, compiled for a TPU that is not there.
compiled: $(VENV)/ready
	$(INSTALL) --editable '.[tpu]'
	$(BIN)/pytest -m thorough benchmarks/test_accelerator.py

demo: $(VENV)/demo-ready
	$(BIN)/fedjaxsim demo --overwrite

# Of the pages and notebooks; nothing is fetched but, the first time, what builds it.
docs: $(VENV)/docs-ready
	nice $(BIN)/sphinx-build -q -W --keep-going -c docs . build/site
	@echo "the site is build/site/index.html"

# The files that are published, checked, and the demo of the wheel alone in an environment of its own.
release: $(VENV)/ready
	rm -rf dist build/wheel-env
	$(INSTALL) build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[plots,tables]"
	cd build && wheel-env/bin/fedjaxsim demo --seeds 1 --quiet --out wheel-demo --overwrite

$(VENV)/docs-ready: $(VENV)/ready
	$(INSTALL) --editable . --group docs
	@touch $@

$(VENV)/ready: $(VENV)/demo-ready
	$(INSTALL) --editable '.[all]' --group dev
	@touch $@

# Dependency groups need pip 25.1, which Python 3.11 does not bring.
$(VENV)/demo-ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedjaxsim needs Python 3.11 or newer; call make PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade 'pip>=25.1'
	$(INSTALL) --editable '.[plots,tables]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache runs dist build
