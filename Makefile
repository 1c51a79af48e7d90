# Each target works as the only command in a fresh clone: it makes the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JAX_VENV := .venv-jax
STAMP := $(VENV)/installed

.PHONY: demo test check bench bench-peers conformance-native format clean

demo: $(STAMP)
	$(BIN)/python examples/byte_gpt.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.recording
	$(BIN)/python -m benchmarks.closures
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.steps

# Optional: what `bench` compares with beyond torch. An environment of its own, so that JAX's numpy is no matter of ours.
bench-peers: $(JAX_VENV)/installed

$(JAX_VENV)/installed:
	$(PYTHON) -m venv $(JAX_VENV)
	$(JAX_VENV)/bin/python -m pip install --quiet jax jaxlib numpy
	touch $@

# Every operator of torch's database as a native library of its own: an hour and more.
conformance-native: $(STAMP)
	LAZYSTEP_NATIVE_OPS=all $(BIN)/python -m pytest -n 2 tests/conformance/test_native.py

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
