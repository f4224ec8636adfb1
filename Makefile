# `make run` starts a server, `make test` is what CI runs. Both install what they need on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet --progress-bar off
NODE := tests/conformance/node_modules
HUB_JS := clients/hub-js
WORKERS ?= 3# tests at once: most of them wait more than they compute
NIGHTLY_WORKERS ?= 2# the long runs compute more
LONG_RUN = $(BIN)/python -m pytest -n $(NIGHTLY_WORKERS) --dist worksteal --timeout 0 --hypothesis-profile explore

# Stamps lie beside what they vouch for, so removing an installation removes its stamp.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
NODE_STAMP := $(NODE)/.installed
TSC_STAMP := $(HUB_JS)/node_modules/.installed
HUB_JS_STAMP := $(HUB_JS)/dist/.built
AUDIT := $(VENV)/audit
PIP_AUDIT := pip-audit==2.10.1

export PYTHON
.DEFAULT_GOAL := help
.PHONY: help setup run test check bench nightly audit format docs archive lock clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-8s %s\n' "$$name" "$$text"; done

setup: $(RUN_STAMP) $(DEV_STAMP) $(NODE_STAMP) $(HUB_JS_STAMP) ## install everything that running and testing need

run: $(RUN_STAMP) ## start a server; flags go into ARGS="--port 5000"
	@exec $(BIN)/tailrace serve $(ARGS)

test: check $(NODE_STAMP) $(HUB_JS_STAMP) ## check, then run every test
	@echo "==> pytest"
ifeq ($(ARGS),)
	@# The public suite minds the clock: it runs by itself.
	@$(BIN)/python -m pytest -m "not nightly" tests/conformance
	@$(BIN)/python -m pytest -m "not nightly" -n $(WORKERS) --ignore tests/conformance
else
	@$(BIN)/python -m pytest -m "not nightly" -n $(WORKERS) $(ARGS)
endif

check: $(DEV_STAMP) ## lint, formatting, types, layers, tidiness
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@echo "==> pyright"
	@$(BIN)/pyright --warnings
	@echo "==> import-linter"
	@$(BIN)/lint-imports --no-logo >$(VENV)/.layers 2>&1 || { cat $(VENV)/.layers; exit 1; }
	@echo "==> tidy"
	@$(BIN)/python -m pytest -q tests/test_tidy.py

bench: $(DEV_STAMP) ## measure against the peers, side by side (long)
	@$(BIN)/python -m bench $(ARGS)

nightly: $(DEV_STAMP) ## the long crash and fault runs (ARGS: some of them)
ifeq ($(ARGS),)
	@# The suite repeats its examples; in the second run the same properties meet new ones.
	@status=0; \
	$(LONG_RUN) -m nightly --durations 40 || status=1; \
	$(LONG_RUN) -m "not nightly" tests/property tests/unit || status=1; \
	exit $$status
else
	@$(LONG_RUN) -m nightly $(ARGS)
endif

audit: $(AUDIT)/.installed ## compare the locked packages with public advisories (needs the network)
	@sh scripts/need npm
	@$(AUDIT)/bin/python scripts/audit.py

format: $(DEV_STAMP) ## format the code and mend what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(DEV_STAMP) ## write the generated pages again
	@$(BIN)/python scripts/pages.py

archive: $(DEV_STAMP) ## store a data directory and a bucket of this version for the compatibility tests
	@PYTHONPATH=tests $(BIN)/python -m compatibility.archive

lock: $(DEV_STAMP) ## resolve the locked versions again (needs uv in the environment)
	$(BIN)/python -m uv pip compile pyproject.toml --extra watch --group build --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --upgrade --output-file requirements/run.txt
	$(BIN)/python -m uv pip compile pyproject.toml --extra watch --extra postgres --extra mongo --group dev --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --constraint requirements/run.txt --output-file requirements/dev.txt

clean: ## remove installations and caches, never data
	rm -rf $(VENV) $(NODE) $(HUB_JS)/node_modules $(HUB_JS)/dist .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@sh scripts/need venv
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): requirements/run.txt pyproject.toml | $(BIN)/python
	@echo "==> installing the server's packages (a minute or two, once)"
	@$(PIP) --require-hashes -r requirements/run.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV_STAMP): requirements/dev.txt $(RUN_STAMP)
	@echo "==> installing the development tools"
	@sh scripts/need npm curl git cc java postgres chromium
	@$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

# By itself: what it needs is not among the packages that it looks at.
$(AUDIT)/.installed: Makefile
	@sh scripts/need venv
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --disable-pip-version-check --no-input --quiet --progress-bar off $(PIP_AUDIT)
	@touch $@

$(NODE_STAMP): tests/conformance/package.json tests/conformance/package-lock.json
	@sh scripts/need npm
	@echo "==> installing the conformance suite (npm ci)"
	@cd tests/conformance && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

$(TSC_STAMP): $(HUB_JS)/package.json $(HUB_JS)/package-lock.json
	@sh scripts/need npm
	@echo "==> installing the compiler of the hub's client (npm ci)"
	@cd $(HUB_JS) && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

$(HUB_JS_STAMP): $(wildcard $(HUB_JS)/src/*.ts) $(HUB_JS)/tsconfig.json $(TSC_STAMP)
	@echo "==> building the hub's client"
	@cd $(HUB_JS) && rm -rf dist && node_modules/.bin/tsc
	@touch $@
