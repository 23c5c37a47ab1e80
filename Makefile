# Two commands: `make quickstart` and `make test`. Everything they make is in .venv, data and runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/quickstart

.PHONY: quickstart test lint clean

quickstart: $(VENV)/.installed
	scripts/quickstart.sh $(BIN)/nanosprint $(RUN)

test: $(VENV)/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3  # hundreds of processes, which would compile our modules each

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints-cpu.txt scripts/install.sh
	scripts/install.sh $(PYTHON) $(VENV) quickstart
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-cpu.txt scripts/install.sh
	scripts/install.sh $(PYTHON) $(VENV) dev
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
