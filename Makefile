# Every target first makes .venv or brings it up to date (launch/make_env.sh); none needs one active.
.DEFAULT_GOAL := help
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

# Without an accelerator libtpu and the CUDA plugin, which are here to compile for one, look for it at
# length and aloud.
ifeq ($(wildcard /dev/accel* /dev/vfio/[0-9]* /dev/nvidia[0-9]* /dev/kfd /dev/dxg),)
export JAX_PLATFORMS ?= cpu
endif

PY := .venv/bin/python
# Whole files to a process: a file's tests share what they compiled.
PYTEST := $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile
SOURCES := vhajax pallas_kernels experiments launch tests

.PHONY: help env transformers train compare sizes test test-slow format format-check lint types clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

env: ## make .venv, or bring it up to date
	@bash launch/make_env.sh

transformers: ## make .venv-transformers: torch and transformers, for those slow tests that need them
	@bash launch/make_transformers_env.sh

train: env ## train, fold and decode a small model on this machine
	@$(PY) launch/demo.py

compare: env ## train every mechanism, two seeds each, into one table (about 12 minutes on two cores)
	@$(PY) launch/compare.py

sizes: env ## write experiments/SIZES.md: parameters and cache of every experiment
	@$(PY) launch/sizes.py

test: env ## run the tests
	@$(PYTEST)

test-slow: env ## run the tests marked slow
	@$(PYTEST) -m slow || [ $$? -eq 5 ] # 5: no test is marked slow

format: env ## rewrite the code in the project's format
	@$(PY) -m ruff format $(SOURCES)
	@$(PY) -m ruff check --select I --fix --quiet $(SOURCES)

format-check: env ## say what `make format` would rewrite
	@$(PY) -m ruff format --check $(SOURCES)

lint: env ## look for mistakes with ruff
	@$(PY) -m ruff check $(SOURCES)

types: env ## check the types with pyright
	@$(PY) -m pyright --pythonpath $(PY)

clean: ## remove .venv and every cache and build output
	rm -rf .venv .venv-transformers build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
