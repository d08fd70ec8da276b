# Every target first sets up .venv if it is missing or out of date. PYTHON=python3.12 chooses the interpreter, CPU=1
# the CPU build of torch.
PYTHON ?=
CPU ?=
PYTEST_ARGS ?=
WORKERS ?= 2
RECIPES ?=
DRILLS ?=
TINY ?=
SLICES ?=
MINUTES ?=
MODEL ?=

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help readme setup setup-any demo report docs notebooks test test-all smoke walk drill gpu image-test check format pins clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1	/p' $(MAKEFILE_LIST) | while IFS="	" read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

setup: ## create .venv with the pinned packages (other targets do this first; CPU=1: torch for CPUs; LIGHT=1: 1 GB less)
	@PYTHON="$(PYTHON)" TORCH_BUILD="$(if $(CPU),cpu)" LIGHT="$(LIGHT)" scripts/setup.sh

setup-any: ## like setup, but a .venv made with LIGHT=1 stays as it is (tests and checks do this)
	@PYTHON="$(PYTHON)" TORCH_BUILD="$(if $(CPU),cpu)" KEEP=1 scripts/setup.sh

demo: setup ## train, run and compare several small translators, about five minutes on two cores
	@PATH="$(CURDIR)/$(BIN):$$PATH" recipes/quickstart/run.sh

report: setup ## all results next to the papers' figures, in runs/report/report.md (RUNS=... for other runs); also a page of the docs
	@$(BIN)/python -m recipes report

docs: setup ## build the documentation into site/ (open site/index.html)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html"

notebooks: setup ## run the notebooks of docs/notebooks, a minute each
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbmake --nbmake-timeout=300 docs/notebooks

test: setup-any ## run the quick tests, six minutes on two cores (PYTEST_ARGS="-k name" selects, WORKERS=0 for one process)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

test-all: setup-any ## run all tests, the slow ones too
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

smoke: setup ## run every recipe end to end on tiny generated data (RECIPES="ptb_awd_lstm" selects)
	@names=$$($(BIN)/python -m recipes smoke --list $(RECIPES)) && printf '%s\n' $$names | \
	  xargs -n 1 -P $(if $(filter 0,$(WORKERS)),1,$(WORKERS)) $(BIN)/python -m recipes smoke

walk: ## run the README's commands in a new copy and environment (MODEL=DIR: of a real model)
	@$(or $(PYTHON),python3) scripts/walk_readme.py $(MODEL)

drill: setup ## kill, stop and starve the commands
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_drills.py

gpu: setup ## measure what needs a GPU, again to resume (SLICES="output ptb", MINUTES=8 for each; TINY=1: tiny, on the CPU)
	@$(BIN)/python -m benchmarks.gpu $(if $(TINY),--tiny) $(if $(SLICES),--slices $(SLICES)) $(if $(MINUTES),--minutes $(MINUTES))

image-test: ## build the image for CPUs and run what docker/README.md promises (ENGINE=podman: as root, without Docker)
	@docker/image_test.sh

check: setup-any ## lint, formatting and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: setup-any ## fix lint and formatting
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

readme: setup-any ## update tables and pictures of all READMEs and stored help, after methods, results or options changed
	@$(BIN)/python scripts/update_readme.py

pins: ## resolve requirements/pins.in again
	@PYTHON="$(PYTHON)" scripts/update_pins.sh

clean: ## remove .venv, caches and build products
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
