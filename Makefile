# make run    set up, then prove all five phases on 8 ranks (a GPU where there is one, else the emulator)
# make test   set up, then `megamoe ci` (build; all phases on 1, 2 and 8 ranks), then the whole test suite
# make ci     set up, then only `megamoe ci`
# make build  set up, then compile every phase; registers and spills
# make seeds  200 race-checked seeds of the kernel on the emulator (minutes)
# make mutants  does the test suite see every fault of tests/mutants? (minutes)
# make policies  every legal configuration at phases l1, l2 and combine on 1, 2 and 8 ranks (the emulator: half an hour)
# make fuzz   random legal cases on the emulator against the oracle; FUZZ_ARGS='--minutes 30 --seed 7'
# make setup  only set up; cheap when nothing changed
#
# Interpreter: MEGAMOE_PYTHON when given; else python3 when it already has torch and CuPy (a CUDA container, no network
# needed); else a virtual environment in $(VENV).
#   make TORCH='torch==2.13.0'      the torch requirement to install (a CPU build is preferred where there is no GPU)
#   make PIP_FLAGS='--no-cache-dir' more flags for pip
#   make run ARGS='--tokens 8'      more arguments for the command (make test: for pytest)
#   make ci CI_ARGS='--ranks 8'     more arguments for megamoe ci (make test too)

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
ARGS ?=
CI_ARGS ?=
FUZZ_ARGS ?=
# pytest processes; more than 8 only fight over the disk
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))

ifndef MEGAMOE_PYTHON
  # find_spec, not import: importing torch takes seconds, and this line runs every time
  HAS_STACK := $(shell $(PYTHON) -c 'import importlib.util as u; print(*[m for m in ("torch", "cupy") if u.find_spec(m)])' 2>/dev/null)
  ifeq ($(HAS_STACK),torch cupy)
    MEGAMOE_PYTHON := $(PYTHON)
  endif
endif
ifdef MEGAMOE_PYTHON
  PY := $(MEGAMOE_PYTHON)
  SETUP := .ci/setup check "$(PY)"
else
  PY := $(VENV)/bin/python
  SETUP := .ci/setup venv "$(PYTHON)" "$(VENV)" "$(TORCH)" $(PIP_FLAGS)
endif

.DEFAULT_GOAL := help
.PHONY: help setup run ci test test-gpu build clean seeds mutants policies fuzz

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup:
	@$(SETUP)

run: setup
	$(PY) -m megamoe_cli test --ranks 8 --phase all $(ARGS)

build: setup
	$(PY) -m megamoe_cli build $(ARGS)

ci: setup
	$(PY) -m megamoe_cli ci $(CI_ARGS)

# The suite runs even when ci failed, and last, so that its closing line is what one sees.
# loadgroup keeps the gpu tests in one process: they share one device. A test that fails is run once more where the
# plugin is there, and shown as rerun: many watch real processes against the clock, and 2 cores can be late
test: setup
	@code=0; $(PY) -m megamoe_cli ci $(CI_ARGS) || { code=$$?; echo "megamoe ci failed (exit $$code); now the test suite"; }; \
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $$($(PY) -c 'import pytest_rerunfailures' 2>/dev/null && echo --reruns 1) $(ARGS) || code=$$?; exit $$code

seeds: setup
	$(PY) -m megamoe_cli test --sanitize --campaign 200 $(ARGS)

mutants: setup
	$(PY) -m tests.mutants.campaign $(ARGS)

policies: setup
	$(PY) -m megamoe_cli test --policy all $(ARGS)

fuzz: setup
	$(PY) -m megamoe_cli fuzz $(FUZZ_ARGS)

# With several GPUs and pytest-xdist: tests of one GPU side by side, each process with a GPU of its own, then those that want all.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
test-gpu: setup
	@if [ "$(GPUS)" -gt 1 ] && $(PY) -c 'import xdist' 2>/dev/null; then code=0; \
	MEGAMOE_TEST_GPU_EACH=1 $(PY) -m pytest -n $(GPUS) --dist worksteal -m "gpu and not all_gpus" tests/gpu $(ARGS) || code=$$?; \
	$(PY) -m pytest -m "gpu and all_gpus" tests/gpu $(ARGS) || code=$$?; exit $$code; \
	else $(PY) -m pytest -m gpu tests/gpu $(ARGS); fi

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis
