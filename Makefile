# spec-serve: `make serve` and `make test` need Python 3.11 or newer, and make. The rest is set up
# in .venv; stamp files in .venv/.stamps make a second run start at once.

MODEL ?= smollm2-135m-instruct
HOST  ?= 127.0.0.1
PORT  ?= 8000
# More options of `spec-serve`, for example ARGS="--draft lookup"
ARGS  ?=
# Extras to install beside the default ones, for example EXTRAS=gpu
EXTRAS ?=
# Which tests, for example TESTS="tests/spec -k verify"
TESTS ?=
# Test processes, more than cores: many tests wait. Files are the unit, as fixtures of a module are
# expensive; tests/conftest.py puts the slowest first. Plugins that other packages bring along stay
# out, as every process would take seconds to import them; modules are compiled once, not by every
# server that a test starts.
JOBS  ?= 3

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
TORCH  := $(STAMPS)/constraints.txt
PIP    := $(BIN)/python -m pip --disable-pip-version-check
EMPTY  :=
COMMA  := ,
SPACE  := $(EMPTY) $(EMPTY)
# "gpu flash-attn" -> the requirement .[gpu,flash-attn] and a stamp of its own
list    = [$(subst $(SPACE),$(COMMA),$(strip $1))]
RUN    := $(STAMPS)/run$(subst $(SPACE),,$(addprefix +,$(strip $(EXTRAS))))
DEV    := $(STAMPS)/dev$(subst $(SPACE),,$(addprefix +,$(strip $(EXTRAS))))
# What serves: the test environment has everything too.
READY  := $(if $(wildcard $(DEV)),$(DEV),$(RUN))

.DEFAULT_GOAL := help
.PHONY: help serve test lint bench clean
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

serve: $(READY) ## set up, fetch the default model and serve it
	@echo "spec-serve: serving $(MODEL); it says what to open once it is ready (Ctrl-C stops it)"
	@exec $(BIN)/spec-serve --target $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(DEV) ## set up and run the whole test suite, lint and types included
	PYTHONDONTWRITEBYTECODE= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/pytest -p xdist.plugin -p _hypothesis_pytestplugin \
	    -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

lint: $(DEV) ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## measure latency with the default model, speculation on and off
	$(BIN)/spec-serve bench latency --target $(MODEL) $(ARGS)

clean: ## remove the environment and every cache of the tools (models stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@python=; for name in python3.13 python3.12 python3.11 python3 python; do \
	    if command -v $$name >/dev/null 2>&1 && \
	        $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	            >/dev/null 2>&1; \
	    then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "spec-serve needs Python 3.11 or newer with its venv module, and none was found." >&2; \
	    echo "Install one (Debian, Ubuntu: apt install python3 python3-venv) and run make again." >&2; \
	    exit 1; \
	fi; \
	echo "spec-serve: setting up $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@mkdir -p $(STAMPS)

$(TORCH): .ci/install_torch.py | $(BIN)/python
	@mkdir -p $(STAMPS)
	@$(BIN)/python .ci/install_torch.py --constraint $@
	@touch $@

$(RUN): WHAT = .$(if $(strip $(EXTRAS)),$(call list,$(EXTRAS)))
$(DEV): WHAT = .$(call list,dev $(EXTRAS))
$(RUN) $(DEV): pyproject.toml $(TORCH)
	@echo "spec-serve: installing $(WHAT)"
	@$(BIN)/python .ci/install_torch.py --constraint $(TORCH) --refuse-cuda -e '$(WHAT)'
	@$(PIP) install --quiet --constraint $(TORCH) -e '$(WHAT)'
	@touch $@
