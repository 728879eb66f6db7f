# Each target does all the set-up that it needs, and that takes no time when nothing changed.
#   make run ARGS="--port 9000 --llm PATH"     make test ARGS="tests/unit -k stream"     make PYTHON=python3.12 run

VENV ?= .venv
ARGS ?=
# Processes among which the files of tests are shared out; 0: all in one.
JOBS ?= 0
BIN := $(VENV)/bin
export VENV PYTHON

.DEFAULT_GOAL := help
.PHONY: help run test check chaos bench bench-gpu compile-gpu setup clean

help:
	@echo "make run    start everything on this machine, then open http://127.0.0.1:8000"
	@echo "make test   run the tests"
	@echo "make check  lint, format and type checks"
	@echo "make chaos  mixed traffic for ten minutes, while processes are killed, paused and cut off at random"
	@echo "make bench  measure the plumbing"
	@echo "make bench-gpu  measure the kernels on this GPU"
	@echo "make compile-gpu  compile them in all configurations for GPUs that need not be here"
	@echo "make setup  only install, for development"
	@echo "make clean  remove what the others made, the virtual environment included"

run:
	@scripts/setup all
	@exec $(BIN)/motet up $(ARGS)

test:
	@scripts/setup dev
	@scripts/ensure_chromium
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses=4 --dist=loadfile $(ARGS)

check:
	@scripts/setup dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

chaos:
	@scripts/setup dev
	PYTHONPATH=tests:models/recipes $(BIN)/python -m chaos.storm $(ARGS)

bench:
	@scripts/setup dev
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-gpu:
	@scripts/setup dev
	$(BIN)/python benchmarks/gpu_kernels.py $(ARGS)

compile-gpu:
	@scripts/setup dev
	$(BIN)/python -m motet_kernels.gpu.compile --all $(ARGS)

setup:
	@scripts/setup dev

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
