# Targets are thin wrappers; what needs a setting is a command of `rivet`.
# RECIPE picks a recipe, ARGS adds overrides: make stage1 RECIPE=... ARGS="--learning_rate 1e-4"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
STUDY  ?= mini
# vLLM for CPUs pins other versions than .venv has, so it has an environment of its own.
VLLM   := .venv-vllm

# Small models on few cores: a second thread costs more than it gives.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm test-vllm demo test test-all lint format warmstart stage1 collect stage2 eval report \
        export solve serve study bench bench-rollouts bench-serve bench-sandbox bench-grading bench-train clean \
        latent latent-study

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rivet needs Python 3.11+, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

setup-vllm: $(VLLM)/.installed ## build .venv-vllm: rivet beside vLLM for CPUs (4 GB)

# torch is asked for first: a looser request would bring the CUDA build.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

test-vllm: setup-vllm ## the tests with a real vLLM
	$(VLLM)/bin/python -m pytest -q -m vllm --timeout 1800 tests/with_vllm $(ARGS)

demo: setup ## the whole method on the mini-world, in about ten minutes
	$(BIN)/rivet demo $(RECIPE) $(ARGS)

test: setup ## the tests
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not vllm" $(ARGS)

test-all: setup ## the tests and the slow ones: a small demo, kill-and-resume of every stage
	$(BIN)/python -m pytest -q -m "not gpu and not vllm" $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

warmstart: setup ## build and warm-start the mini controller
	$(BIN)/rivet warmstart $(or $(RECIPE),stages/recipes/warmstart_mini.yaml) $(ARGS)

stage1: setup ## Stage I: expert-augmented RL
	$(BIN)/rivet stage1 $(or $(RECIPE),stages/recipes/stage1_mini.yaml) $(ARGS)

collect: setup ## sample and grade trajectories for Stage II
	$(BIN)/rivet collect $(or $(RECIPE),stages/recipes/collect_mini.yaml) $(ARGS)

stage2: setup ## Stage II: verified trajectory internalization
	$(BIN)/rivet stage2 $(or $(RECIPE),stages/recipes/stage2_mini.yaml) $(ARGS)

eval: setup ## evaluate a checkpoint in the conditions of the recipe
	$(BIN)/rivet eval $(or $(RECIPE),stages/recipes/eval_mini.yaml) $(ARGS)

report: setup ## write the HTML report of a run folder: ARGS="runs/demo"
	$(BIN)/rivet report $(ARGS)

export: setup ## write a checked Hugging Face folder
	$(BIN)/rivet export --config $(or $(RECIPE),stages/recipes/export_mini.yaml) $(ARGS)

solve: setup ## answer one problem: ARGS='runs/demo/export "Find the GCD of 252, 198."'
	$(BIN)/rivet solve $(ARGS)

serve: setup ## OpenAI's chat API and a web page: ARGS="runs/demo/export --port 8000"
	$(BIN)/rivet serve $(ARGS)

study: setup ## arms over seeds (hours): runs/study; STUDY=format and others: runs/study-format
	$(BIN)/rivet study $(or $(RECIPE),stages/recipes/study_$(STUDY).yaml) $(ARGS)

latent: setup ## latent collaboration and its controls on the latent world
	$(BIN)/rivet latent $(or $(RECIPE),stages/recipes/latent_mini.yaml) $(ARGS)

latent-study: setup ## every arm of latent collaboration over seeds (under an hour): runs/latent-study
	$(BIN)/rivet latent-study $(or $(RECIPE),stages/recipes/latent-study_mini.yaml) $(ARGS)

bench: setup ## rollout tokens per second against plain batched sampling
	$(BIN)/python -m rivet.rollout.bench $(ARGS)

bench-rollouts: setup ## a batch that waits for experts beside TRL's tool loop: ARGS="--picture FILE.png"
	$(BIN)/python -m stages.bench_rollouts $(ARGS)

bench-sandbox: setup ## sandbox calls against bare fork and a subprocess
	$(BIN)/python -m sandbox.bench $(ARGS)

bench-serve: setup ## 64 clients on a server for a minute: ARGS="runs/demo/export"
	$(BIN)/python -m rivet.serving.bench $(ARGS)

bench-train: setup ## training steps and memory against TRL's, and a store to its first batch
	$(BIN)/python -m stages.bench_train $(ARGS)

bench-grading: setup ## grading rate against math-verify
	$(BIN)/python -m rivet.grading.bench $(ARGS)

clean: ## remove caches and builds; runs/ and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
