# Needs python3 (3.10 or newer, with venv), g++ and make. Everything else goes into .venv, from constraints.txt.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := fusec passes codegen models tests bench examples

# Two test processes with one thread each beat one process with two. Each takes up to 3 GB.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
FAST := $(addprefix tests/,analysis ir loops passes rewriting test_documentation.py test_fusions.py test_golden_pages.py \
	test_language.py test_layout.py test_packaging.py test_pipeline.py verify)
# Each process has its half of the tests, in order, so that neighbours share what they build; who is done first helps.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help demo quantized test lint check verify fix golden clean

help: ## what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@echo "Installing torch and the rest into $(VENV), once: some minutes, and several GB on most machines."
	@$(PYTHON) -c 'import sys; sys.exit("fusec needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	@$(PYTHON) -m venv $(VENV) || { echo "Python has no venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	@touch $@

demo: $(READY) ## compile a sentence-embedding BERT with its real weights, and compare it with eager and Inductor
	$(BIN)/python examples/embed.py

quantized: $(READY) ## quantize the model of the demo, and compare embeddings of sentences that it has not seen
	$(BIN)/python examples/quantized_embed.py

test: $(READY) ## all tests except those marked thorough
	$(PYTEST)

lint: $(READY) ## format, lint, types and layering
	$(BIN)/ruff format --check --quiet $(SOURCES)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## format, lint, types, layering and the fast tests, in a few minutes
	$(PYTEST) -q -m "not slow and not thorough" $(FAST)

verify: $(READY) ## everything that takes too long for CI; results with commit, seed and versions go to bench/results and tests/campaigns/results
	@failed=; \
	for module in \
		"pytest -n $(WORKERS) --dist worksteal --override-ini=addopts=--import-mode=importlib" \
		"tests.campaigns.models --check --faults" \
		tests.campaigns.verification \
		tests.campaigns.architectures \
		"tests.campaigns.spellings --each" \
		tests.campaigns.mutants \
		tests.campaigns.cache_faults \
		tests.campaigns.injection \
		tests.campaigns.op_db \
		tests.campaigns.sanitize \
		"tests.campaigns.fuzz --target interpreter --count 20000 --json none" \
		"tests.campaigns.fuzz --target cpp --count 2000 --json none" \
		"tests.campaigns.fuzz --target triton --count 500 --json none" \
		"tests.campaigns.fuzz --target backend --count 1000 --json none" \
		tests.campaigns.quantized \
		tests.campaigns.packed \
		"tests.campaigns.triton_kernels --full" \
		"tests.campaigns.triton_kernels --full --mode max-autotune --shapes 2x20,2+20 --dtypes bfloat16,float32" \
		bench.triton_chips \
		"bench.triton_chips --mode max-autotune" \
		"bench.triton_chips --mode max-autotune --candidates --chips sm_90 --dtypes bfloat16" \
		tests.campaigns.training \
		bench.generate \
		bench.compile_time \
		bench.speed \
		bench.cpu \
		"bench.sweeps --dtypes float32,bfloat16" \
		bench.quantized \
		bench.quantized_caches \
		bench.serving \
		bench.sharing \
		bench.memory \
		bench.attention \
		bench.roofline; do \
		echo "== python -m $$module"; \
		HYPOTHESIS_PROFILE=thorough $(BIN)/python -m $$module || failed+=" $${module%% *}"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

fix: $(READY) ## format, and apply the linter's automatic fixes
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

golden: $(READY) ## regenerate expected texts, docs/golden and the pages' tables; review the diff before committing
	$(BIN)/python -m tests.golden_pages
	$(BIN)/python -m pytest -q --update-golden tests

clean: ## remove the environment and every cache
	rm -rf $(VENV) build *.egg-info .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
