# `make demo` and `make test` need Python >= 3.11, git and make, and nothing else: they make .venv and install into it.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench docs clean

demo: .venv/installed
	$(BIN)/python examples/python_stdlib/demo.py

# compiled first: tests start some hundred processes. Two files of tests at once, since one is mostly on one core
test: lint
	$(BIN)/python -m compileall -q src
	$(BIN)/pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/installed
	$(BIN)/python benchmarks/training.py

docs: .venv/installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache build

# torch first, by its exact version: everything else then finds it there and fetches no other build. DeepSpeed's setup
# looks at it, so pip must not build in isolation; what it has to compile, it compiles when a run needs it
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "drawbar needs Python 3.11 or newer; say which: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) setuptools torch
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation deepspeed
	$(INSTALL) -e '.[dev]'
	touch $@
