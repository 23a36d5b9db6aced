# Each target sets up everything it needs in .venv; only Python 3.11 or newer is assumed.
PYTHON ?= python3
BIN := .venv/bin
export MPLBACKEND := Agg

.PHONY: test test-all lint types unit thorough demo clean

# Every capability and every law once; test-all adds repetitions over sizes, doors and seeds.
test: lint types unit

test-all: lint types thorough

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/pyright --warnings

# A file's tests share what one of them has set up or compiled.
unit: .venv/ready
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not thorough"

thorough: .venv/ready
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

demo: .venv/ready
	$(BIN)/fedjaxsim demo --out runs/demo --overwrite

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedjaxsim needs Python 3.11 or newer; call make PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache runs dist
