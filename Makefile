# Each target does all the set-up that it needs, and that takes no time when nothing changed.
#   make run ARGS="--port 9000 --llm PATH"     make test ARGS="tests/unit -k stream"     make PYTHON=python3.12 run

VENV ?= .venv
ARGS ?=
# Processes that run tests; 0: all in one.
JOBS ?= logical
PART ?=
BIN := $(VENV)/bin
export VENV PYTHON

.DEFAULT_GOAL := help
.PHONY: help run test test-long extended tiers check bench gpu compile-gpu setup clean

help:
	@echo "make run    start everything on this machine, then open http://127.0.0.1:8000"
	@echo "make test   run the tests that answer within minutes"
	@echo "make test-long  run the rest of what must pass before a change is merged"
	@echo "make extended PART=conformance|eyes|families|gpu|groups|peers|soak|storm  run what takes up to an hour, outside CI"
	@echo "make tiers  print the tier of each test, or with ARGS=--summary their numbers by file"
	@echo "make check  lint, format, types and structure"
	@echo "make bench  measure the plumbing"
	@echo "make gpu    test and measure a GPU, in parts of at most 8 minutes; the same as PART=gpu"
	@echo "make compile-gpu  compile them in all configurations for GPUs that need not be here"
	@echo "make setup  only install, for development"
	@echo "make clean  remove what the others made, the virtual environment included"

run:
	@scripts/setup all
	@exec $(BIN)/motet up $(ARGS)

test:
	@scripts/setup dev
	@scripts/ensure_chromium
	$(BIN)/python -m pytest --tier=test -n $(JOBS) --maxprocesses=4 --dist=worksteal $(ARGS)

test-long:
	@scripts/setup dev
	@scripts/ensure_chromium
	@scripts/ensure_node_modules
	JOBS=$(JOBS) scripts/test_long $(ARGS)

extended:
	@scripts/setup dev
	@scripts/ensure_chromium
	$(BIN)/python scripts/extended.py $(PART) $(ARGS)

tiers:
	@scripts/setup dev
	@$(BIN)/python scripts/list_tiers.py $(ARGS)

check:
	@scripts/setup dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2
	@$(BIN)/python scripts/check_structure.py >/dev/null

bench:
	@scripts/setup dev
	$(BIN)/python benchmarks/run.py $(ARGS)

gpu:
	@$(MAKE) --no-print-directory extended PART=gpu

compile-gpu:
	@scripts/setup dev
	$(BIN)/python -m motet_kernels.gpu.compile --all $(ARGS)

setup:
	@scripts/setup dev

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
