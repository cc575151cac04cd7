# Everything a person runs. Needs Python 3.11, make and pip; each target installs what it lacks and skips what is done.
#
#   make serve [MODEL=Qwen/Qwen3-0.6B] [PORT=8000] [ARGS="--tensor-parallel-size 2"]
#   make loadtest [SCENARIO=steered] [SHAPE=spike] [TIME=60] [USERS=1] [URL=http://127.0.0.1:8000]
#   make test [SLICE=1/6] | test-fast | test-all | check | audit | docs | soak | fuzz | bench | image-check | format | clean

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
MODEL ?=
PORT ?= 8000
ARGS ?=
TESTS ?=
SCENARIO ?= mixed
SHAPE ?= steady
TIME ?= 120
USERS ?= 1
URL ?=
ADMIN_KEY_FILE ?=
# Processes that share the tests; 0 runs all in one, in order, as a debugger wants it.
WORKERS ?= 2
# Of the tests marked heavy, the K-th of N slices, as SLICE=K/N, or SLICE=next; `make test` runs none of them else.
SLICE ?=
# RECORD=1 writes how long heavy tests take to tests/durations.json, by which they are cut into slices.
RECORD ?=
# "required" makes a missing PostgreSQL a failure, where tests that need it are skipped else.
POSTGRES ?= $(if $(CI),required,)
# Likewise promtool, which checks the alert rules.
PROMTOOL ?= $(if $(CI),required,)
# Chromium, in which the playground is tested, and Node.js, which builds it.
CHROMIUM ?= $(if $(CI),required,)
NODE ?= $(if $(CI),required,)
# Clients of other projects, which tests run against the server.
CLIENTS ?= $(if $(CI),required,)

BIN := $(VENV)/bin
INPUTS := pyproject.toml scripts/install.sh $(sort $(filter-out requirements/clients.txt,$(wildcard requirements/*.txt)))
# The stamp's name carries a hash of what decides the installation; file times would not survive a checkout.
INSTALLED := $(VENV)/.installed-$(shell cat $(INPUTS) | sha256sum | cut -c1-16)
# Those of our folders that hold Python; mypy refuses an empty one.
SOURCES = $(shell for d in api_schemas nnsight_engine app benchmarks examples loadtests tests; do \
	[ -z "$$(find $$d -name '*.py' -print -quit 2>/dev/null)" ] || echo $$d; done)
PYTEST = HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) $(if $(filter required,$(POSTGRES)),--require-postgres) \
	$(if $(filter required,$(PROMTOOL)),--require-promtool) \
	$(if $(filter required,$(CHROMIUM)),--require-chromium) $(if $(filter required,$(NODE)),--require-node) \
	$(if $(filter required,$(CLIENTS)),--require-clients) $(if $(RECORD),--record)
# Tests that are named all run.
CORE = $(if $(SLICE),--slice $(SLICE),$(if $(TESTS),,-m "not heavy")) $(TESTS)
FAST = $(if $(TESTS),-m "not e2e" $(TESTS),-m "not e2e and not heavy" tests/unit tests/integration)

.PHONY: help install postgres promtool chromium node clients playground serve test test-fast test-all lint audit check docs soak fuzz bench loadtest image-check format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: $(INSTALLED) ## Virtual environment with the locked packages and this project

$(INSTALLED):
	@command -v "$(PYTHON)" >/dev/null || { echo "Python 3.11 must be installed, found no '$(PYTHON)'; run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit("Python must be 3.11 or newer, got " + v + "; run make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	scripts/install.sh $(VENV)
	@rm -f $(VENV)/.installed-* && touch $@

postgres: ## PostgreSQL for the tests, where it is missing and can be installed
	@scripts/postgres.sh $(POSTGRES)

promtool: ## What checks the alert rules, where it is missing and can be installed
	@scripts/promtool.sh $(PROMTOOL)

chromium: ## The browser that the playground is tested in, where it is missing and can be installed
	@scripts/chromium.sh $(CHROMIUM)

node: ## Node.js and npm, which build the playground, where they are missing and can be installed
	@scripts/node.sh $(NODE)

clients: install ## Clients of other projects, which tests run against the server, in .venv-clients
	@scripts/clients.sh $(BIN)/python $(CLIENTS)

playground: ## The page at /playground, built again from app/playground/src
	@scripts/node.sh required
	cd app/playground && npm ci && npm run build

serve: install ## OpenAI-compatible server on 127.0.0.1:$(PORT); MODEL empty means the bundled model
	@exec $(BIN)/nnsight-engine serve $(MODEL) --port $(PORT) $(ARGS)

test: install postgres promtool chromium node clients ## The tests that every change has to pass, on the real engine too
	@$(if $(TESTS)$(SLICE),true,echo "The core of the tests, a quarter of an hour or more on two cores; those of what is not installed are skipped and listed at the end. make test-fast starts no engine.")
	$(PYTEST) $(CORE)

# Many of these wait rather than compute.
test-fast: WORKERS = 3
test-fast: install postgres ## Those of tests/unit and tests/integration, without vLLM, in some minutes
	$(PYTEST) $(FAST)

test-all: install postgres promtool chromium node clients ## Every test, also the heavy ones: three hours
	$(PYTEST) $(TESTS)

lint: install ## Format, ruff, mypy, layers, bandit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml api_schemas app nnsight_engine

audit: install ## Whether versions of the lock are known to be vulnerable, where somebody can be asked
	@$(BIN)/python scripts/audit.py requirements/cpu.txt requirements/dev.txt

# Lint and audit run beside the tests, and print what is wrong when those have ended.
check: install postgres promtool chromium node clients ## What CI runs: lint and audit beside `make test`
	@log=$$(mktemp); $(MAKE) --no-print-directory lint audit > $$log 2>&1 & linting=$$!; failed=0; \
	$(PYTEST) $(CORE) || failed=$$?; \
	wait $$linting || { failed=1; cat $$log; }; rm -f $$log; exit $$failed

docs: install ## The documentation as a site, in site/; what is wrong with it is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

soak: install ## Faults under load for an hour; ARGS="--minutes 2" for less
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.e2e.soak $(ARGS)

fuzz: install ## Random requests against transformers for an hour; ARGS="--minutes 5 --seed 1" for less
	$(BIN)/python -m tests.e2e.fuzz $(ARGS)

bench: install ## Speed against plain vLLM, as ratios; other tables: ARGS="http"; writes benchmarks/results/
	$(BIN)/python -m benchmarks $(ARGS)

loadtest: install ## Load on a server, with a verdict, see docs/load-testing.md; without URL= one is started
	$(BIN)/python -m loadtests $(SCENARIO) --shape $(SHAPE) --time $(TIME) --users $(USERS) $(if $(URL),--url $(URL)) \
		$(if $(ADMIN_KEY_FILE),--admin-key-file $(ADMIN_KEY_FILE)) $(if $(MODEL)$(ARGS),-- $(MODEL) $(ARGS))

image-check: ## Build the image for CPUs with buildah and try it: Debian, root, 12 GB, ten minutes
	scripts/image_check.sh $(ARGS)

format: install ## Format and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the virtual environment, caches and build output of this checkout
	rm -rf $(VENV) .venv-clients app/playground/node_modules examples/javascript/node_modules build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
