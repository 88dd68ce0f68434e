# Two commands on a fresh machine: `make quickstart` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: quickstart test lint gpu-test clean

quickstart: $(VENV)/ready
	$(BIN)/weave-moe quickstart

test: $(VENV)/ready lint
	$(BIN)/python -m pytest -n 2 -q

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml tools/setup_venv.sh
	PYTHON=$(PYTHON) sh tools/setup_venv.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
