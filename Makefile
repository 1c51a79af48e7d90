# Each target works as the only command in a fresh clone: it makes the virtual environment first.
PYTHON ?= python3
# The release of torch, of the range in pyproject.toml. The default has a build without CUDA.
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
JAX_VENV := .venv-jax
STAMP := $(VENV)/installed

# Tests and builds start hundreds of processes. Each would compile the modules that it imports: 3 s for torch, 11 for Inductor.
unexport PYTHONDONTWRITEBYTECODE

TARGETS := demo fast test nightly check bench extension wheel sanitize
.PHONY: $(TARGETS) bench-peers format clean

# Extensions are built in the tree, for one release of torch. So another release, as in `make test TORCH=2.15.*`, gets a copy of
# the tree with an environment of its own, which takes some gigabytes, and the target is made there.
ifneq ($(TORCH),2.13.0)
ifndef IS_COPY
COPY := build/torch-$(TORCH:.*=)
$(TARGETS):
	mkdir -p $(COPY)
	tar -c --exclude='*.so' --exclude=__pycache__ benchmarks docs examples lazystep tests *.md LICENSE MANIFEST.in Makefile \
	  pyproject.toml setup.py | tar -x -C $(COPY)
	$(MAKE) -C $(COPY) IS_COPY=1 $@
endif
endif

ifndef COPY
demo: $(STAMP)
	$(BIN)/lazystep demo

# Under a minute, with tests of every part. The table of files is in tests/conftest.py.
fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m fast

# Everything that must hold, but for the long runs.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The long runs, an hour or two: torch's whole databases in native libraries, all models, ten times the samples.
nightly: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m nightly
	LAZYSTEP_TEST_SAMPLES=40 $(BIN)/python -m pytest -n 2 tests/conformance/test_ops.py

# Rebuild the extensions in place, after a change in C or C++, or of torch.
extension: $(STAMP)
	$(BIN)/python setup.py build_ext --inplace

# For machines without a compiler, with the same torch and Python: dist/*.whl. What an earlier build has left
# in build/lib* would be packed as well.
wheel: $(STAMP)
	rm -rf build/lib* build/bdist*
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# The tests of what is C and C++ under AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the package. The options
# bound the memory that the sanitizer keeps for itself, because a test looks for growth of the process.
SANITIZED := build/sanitized
sanitize: $(STAMP)
	mkdir -p $(SANITIZED)
	cp -r lazystep benchmarks tests docs README.md pyproject.toml setup.py $(SANITIZED)
	cd $(SANITIZED) && find lazystep -name "*.so" -delete && \
	  LAZYSTEP_SANITIZE=1 $(abspath $(BIN))/python setup.py build_ext --inplace
	cd $(SANITIZED) && env LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:protect_shadow_gap=0:quarantine_size_mb=1:thread_local_quarantine_size_kb=64:malloc_context_size=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  PYTHONPATH=. $(abspath $(BIN))/python -m pytest -q -p no:cacheprovider \
	  tests/record tests/capture --ignore tests/capture/test_optimizers.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# All tables and plots, and every goal as met or missed: an hour of a machine that does nothing else.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[bench]'
	$(BIN)/python -m benchmarks

endif

# Optional: what `bench` compares with beyond torch. JAX gets an environment of its own, because it may need another NumPy.
bench-peers: $(JAX_VENV)/installed

$(JAX_VENV)/installed:
	$(PYTHON) -m venv $(JAX_VENV)
	$(JAX_VENV)/bin/python -m pip install --quiet jax jaxlib numpy
	touch $@

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What the build needs comes first and the build takes it from there: torch is installed once, and is the one to build for.
# Python compiles modules when they are first imported, and keeps that: all of torch's at once took 15 s of processor time.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" \
	  | $(BIN)/python -m pip install --quiet --no-compile 'torch==$(TORCH)' -r /dev/stdin
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation -e '.[demo,test,check]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(JAX_VENV) build dist *.egg-info
