# demo: install, run on the sample videos, show the result.  test: install, run the tests.  check: style and types.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints-cpu.txt
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo test check clean

demo: $(VENV)/.demo
	$(BIN)/qwen-ray demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit $(ARGS)
	$(BIN)/python -m pytest tests/ray tests/gpu $(ARGS)

check: $(VENV)/.check
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/.check: $(VENV)/.test
	$(INSTALL) -e '.[check]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache demo-output
