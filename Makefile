# Every target makes what it needs: on a fresh machine `make run` or `make test` is all the set-up there is.
#   make run PORT=8000 ARGS="--workers 2"     serve the default model
#   make test ARGS="-k fence"                 all tests that need no GPU
SHELL := /bin/bash
VENV ?= .venv
PORT ?= 8000
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
CODE := benchmarks infra kernels services shared tests

.DEFAULT_GOAL := help
.PHONY: help env kernels model run test test-property test-fault soak lint format bench bench-scheduler bench-kv bench-engine bench-kernels \
	bench-gateway bench-quality bench-peers kernels-report gpu-check compose-test clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

env: $(STAMP) ## make or update the virtual environment

$(STAMP): pyproject.toml constraints.txt infra/scripts/environment.sh
	@infra/scripts/environment.sh $(VENV)
	@touch $@

$(KERNELS): $(STAMP) $(wildcard kernels/*/*.cpp kernels/*/*.h) kernels/native/build.py kernels/native/levels.py
	@$(BIN)/python -m kernels.native.build
	@touch $@

kernels: $(KERNELS) ## compile the C++ kernels whose sources changed

model: $(KERNELS) ## fetch and convert the default model, once
	@$(BIN)/pagewire pull

run: model ## serve the default model on PORT; more options in ARGS
	@exec $(BIN)/pagewire up --port $(PORT) $(ARGS)

test: model ## all tests that need no GPU
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

test-property: $(KERNELS) ## the property tests with many more examples
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder tests/property --hypothesis-profile=thorough --timeout=0 $(ARGS)

test-fault: model ## faults of every kind on the default model; writes a report to build/fault; fails if a bar is missed
	$(BIN)/python -m tests.fault --model default --out build/fault --all-but soak $(ARGS)

soak: model ## 20,000 requests, and nothing grows; report in build/soak
	$(BIN)/python -m tests.fault --model default --out build/soak --only soak $(ARGS)

lint: $(STAMP) ## style, types and import contracts
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## put the code into its form
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: model ## load over HTTP at 1, 8, 32 and 64 streams; fails under 100 output tokens/s at 32
	$(BIN)/python -m benchmarks.http_load --floor 32:100 $(ARGS)

bench-scheduler: $(STAMP) ## the scheduler: a step, an admission, the leader's turn with Redis, 64 workers; fails if a bar is missed
	$(BIN)/python -m benchmarks.scheduler_step $(ARGS)

bench-kv: model ## what each mechanism of scheduler and KV cache is worth; fails if a bar is missed
	$(BIN)/python -m benchmarks.kv_cache $(ARGS)

bench-engine: model ## the worker's engine: a step and its parts; in-process against HTTP + Redis; fails if a bar is missed
	$(BIN)/python -m benchmarks.engine_step $(ARGS)

bench-kernels: $(STAMP) ## each kernel against the machine's measured bandwidth or arithmetic peak; fails if a bar is missed
	$(BIN)/python -m benchmarks.kernels $(ARGS)

bench-gateway: model ## CPU time of a gateway per streamed event; fails above 100 µs
	$(BIN)/python -m benchmarks.gateway_events $(ARGS)

bench-quality: model ## perplexity and KL of quantized weights against the exact ones; fails if a bar is missed
	$(BIN)/python -m benchmarks.quality $(ARGS)

bench-peers: model ## beside vLLM and llama.cpp (benchmarks/peers/setup.sh installs them); fails if a bar is missed
	$(BIN)/python -m benchmarks.peers $(ARGS)

kernels-report: $(STAMP) ## registers, shared memory and spills of the Triton kernels, compiled without a GPU; fails if sm_90 spills
	$(BIN)/python -m benchmarks.kernels_report $(ARGS)

gpu-check: $(STAMP) ## the Triton kernels on this machine's GPU: right, and how near to its limits
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

compose-test: ## the four containers: build, stream one chat, take down
	infra/scripts/compose-test.sh

clean: ## remove the environment and every cache
	rm -rf $(VENV) kernels/native/lib build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
