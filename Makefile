# Each target works as the only command in a fresh clone: it makes the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JAX_VENV := .venv-jax
STAMP := $(VENV)/installed

.PHONY: demo test test-python check bench bench-peers conformance-native format native sanitize clean

demo: $(STAMP)
	$(BIN)/lazystep demo

# On the native recorder, where it was built; tests/test_front_ends.py holds the Python one against it.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Everything on the Python recorder.
test-python: $(STAMP)
	LAZYSTEP_RECORDER=python $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Rebuild the extensions in place, after a change in C++.
native: $(STAMP)
	$(BIN)/python setup.py build_ext --inplace

# The recorder's tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the package. What the sanitizer
# itself keeps, freed memory and the stacks of who freed it, is kept small: a test compares the memory of the process.
SANITIZED := build/sanitized
sanitize: $(STAMP)
	mkdir -p $(SANITIZED)
	cp -r lazystep benchmarks tests docs README.md pyproject.toml setup.py $(SANITIZED)
	cd $(SANITIZED) && rm -f lazystep/record/native/*.so && \
	  LAZYSTEP_SANITIZE=1 $(abspath $(BIN))/python setup.py build_ext --inplace
	cd $(SANITIZED) && env LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:protect_shadow_gap=0:quarantine_size_mb=1:thread_local_quarantine_size_kb=64:malloc_context_size=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  LAZYSTEP_RECORDER=native PYTHONPATH=. $(abspath $(BIN))/python -m pytest -q -p no:cacheprovider \
	  tests/record

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# All tables and plots, and every goal as met or missed: an hour of a machine that does nothing else.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	$(BIN)/python -m benchmarks

# Optional: what `bench` compares with beyond torch. An environment of its own, so that JAX's numpy is no matter of ours.
bench-peers: $(JAX_VENV)/installed

$(JAX_VENV)/installed:
	$(PYTHON) -m venv $(JAX_VENV)
	$(JAX_VENV)/bin/python -m pip install --quiet jax jaxlib numpy
	touch $@

# Every operator, module and optimizer of torch's databases in native libraries, and long runs: an hour.
conformance-native: $(STAMP)
	LAZYSTEP_NATIVE_OPS=all $(BIN)/python -m pytest -n 2 tests/conformance/test_native.py tests/execute/test_native_training.py \
	  tests/capture/test_step.py::test_five_hundred_native_replays_stay_close_to_eager

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[demo,test,check]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(JAX_VENV) build *.egg-info
