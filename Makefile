# Needs Python 3.11 to 3.13 with pip, and make. Everything else goes into .venv.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: test lint demo bfcl bench clean

test: lint
	$(BIN)/pytest -m "not ray" -n auto --cov --cov-report=
	$(BIN)/pytest -m ray -n 2 --dist loadfile --cov --cov-append --cov-report=term:skip-covered

lint: $(READY)
	@mkdir -p .cache && ln -sfn "$(CURDIR)" .cache/perdure
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p perdure

demo: $(READY)
	$(BIN)/python -m perdure.examples.demo

bfcl: $(VENV)/.bfcl
	$(BIN)/python benchmarks/bfcl/run.py $(if $(CHAOS),--chaos $(CHAOS))

bench: $(READY)
	$(BIN)/python benchmarks/append_bench.py

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Where venv cannot install pip into the environment, the pip of $(PYTHON) installs there from outside.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; set PYTHON" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --clear --without-pip $(VENV)
	if $(PIP) --version >/dev/null 2>&1; then $(PIP) install --quiet -e '.[dev]'; \
	else $(PYTHON) -m pip --python $(BIN)/python install --quiet -e '.[dev]'; fi
	touch $@

# Its dependencies are not needed by what is used of it, so they are left out.
$(VENV)/.bfcl: $(READY)
	$(PIP) install --quiet --no-deps bfcl-eval==2026.3.23 mpmath
	touch $@
