# `make demo` and `make test` need Python >= 3.11, git and make, and nothing else: they make .venv and install into it,
# the demo what a user of drawbar needs, the tests what its developers need.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation -c constraints.txt
# uv is several times faster, and does not read pip's configuration: where packages come from a mirror, pip finds it
install = $(UV) $(1) || $(PIP) --no-build-isolation $(1)

# where it is set, thousands of processes would compile what they import anew
unexport PYTHONDONTWRITEBYTECODE

# what knows torch and transformers from inside: models, strategies, ranks, checkpoints, launches
VERSION_TESTS := tests/unit/models tests/unit/parallel tests/unit/engines tests/unit/runtime tests/unit/optim \
  tests/unit/util/test_versions.py tests/distributed tests/faults/test_resume.py tests/faults/test_signals.py

.PHONY: demo test exhaustive test-all test-oldest test-newest mutants faults simulate soak quick lint format bench docs clean

demo: .venv/installed
	$(BIN)/python examples/python_stdlib/demo.py

# compiled first: tests start some hundred processes. Three files of tests at once: tests with a scheduler mostly wait
test: MARKED = not exhaustive
exhaustive: MARKED = exhaustive
exhaustive: .venv/installed-others
test exhaustive: lint
	$(BIN)/python -m compileall -q src
	$(BIN)/pytest -q -m "$(MARKED)" --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-all: test exhaustive

# which planted faults the tests notice: hours; MUTANTS="--only loss" for some of them
mutants: .venv/installed-dev
	$(BIN)/python -m compileall -q src
	$(BIN)/python tests/mutants/run.py --jobs 2 $(MUTANTS)

# the figures of docs/reliability.md: every fault in every phase, under several strategies, then the two below; hours.
# The first alone, for some faults: .venv/bin/python tests/faults/fault_table.py --only stop
faults: .venv/installed-dev
	$(BIN)/python tests/faults/fault_table.py --jobs 2
	$(MAKE) simulate soak

# 10,000 schedules of faults on a simulated clock: minutes; SIMULATE="--first 10000" for others
simulate: .venv/installed-dev
	$(BIN)/python tests/simulation/run.py --seeds 10000 --jobs 2 $(SIMULATE)

# one long run with random faults, ranks and strategies: half an hour; SOAK="--seed 1 --faults 50" for another one
soak: .venv/installed-dev
	$(BIN)/python -m compileall -q src
	$(BIN)/python tests/faults/soak.py $(SOAK)

# the two ends of the versions in pyproject.toml, each in an environment of its own, with the Python that goes with them
# where there is one (pyenv's are not on the path); torch is a CUDA build there, and runs on CPUs
runs = $(shell for each in $(1) $(wildcard $(HOME)/.pyenv/versions/*/bin/$(1)) $(PYTHON); do \
  $$each -c "" 2>/dev/null && echo $$each && break; done)
test-oldest: VERSION_PYTHON = $(call runs,python3.12)
test-newest: VERSION_PYTHON = $(call runs,python3.13)
test-oldest test-newest: test-%: constraints/%.txt .venv/installed
	test -x .venv-$*/bin/python || $(BIN)/uv venv --quiet --python $(VERSION_PYTHON) .venv-$*
	$(BIN)/uv pip install --quiet --python .venv-$*/bin/python -c $< torch setuptools setuptools-scm
	DS_BUILD_OPS=0 $(BIN)/uv pip install --quiet --python .venv-$*/bin/python --no-build-isolation -c $< -e '.[dev]'
	.venv-$*/bin/python -m pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder $(VERSION_TESTS)

# less than two minutes: what needs no ranks, and finds most mistakes in settings, names and layers
quick: lint
	$(BIN)/pytest -q --numprocesses 2 tests/unit/config tests/unit/metrics tests/unit/optim tests/unit/test_house_rules.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-bench
	$(BIN)/python -m benchmarks $(BENCH)

# the generated pages, then the site: build/site/index.html
docs: .venv/installed-dev
	$(BIN)/python docs/generate.py
	rm -rf build/site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site

clean:
	rm -rf .venv .pytest_cache .ruff_cache build

# torch first, by its exact version: everything else then finds it there and fetches no other build; setuptools-scm is
# what seqeval is built with
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "drawbar needs Python 3.11 or newer; say which: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools setuptools-scm torch
	-$(PIP) uv
	$(call install,-e '.[report]')
	touch $@

# DeepSpeed's setup looks at torch, so nothing is built in isolation; what it has to compile, it compiles when a run
# needs it
.venv/installed-dev: .venv/installed
	export DS_BUILD_OPS=0; $(call install,-e '.[dev]')
	touch $@

# what losses and scores are compared with; not of the extra dev, as it wants newer libraries than drawbar
.venv/installed-others: .venv/installed-dev
	$(call install,trl lm-eval)
	touch $@

# what drawbar is measured beside
.venv/installed-bench: .venv/installed-dev benchmarks/requirements.txt
	$(call install,-r benchmarks/requirements.txt)
	touch $@
