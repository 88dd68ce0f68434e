# Two commands on a fresh machine: `make quickstart` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: quickstart test lint gpu-test docs clean

quickstart: $(VENV)/ready
	$(BIN)/weave-moe quickstart

test: lint
	$(BIN)/python -m pytest -n 2 -q

# The tests that need a Hopper GPU; skipped with the reason where there is none.
gpu-test: $(VENV)/ready-test
	$(BIN)/python -m pytest -m gpu -q -n 4 --dist loadfile

# The documentation as a site, in site/.
docs: $(VENV)/ready-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q

lint: $(VENV)/ready-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# What running the package takes, and what its tests take on top of that.
$(VENV)/ready: pyproject.toml tools/setup_venv.sh
	PYTHON='$(PYTHON)' sh tools/setup_venv.sh '$(VENV)' plot,transformers
	touch $@

$(VENV)/ready-test: pyproject.toml tools/setup_venv.sh
	PYTHON='$(PYTHON)' sh tools/setup_venv.sh '$(VENV)' test
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis weave-run weave-profile
