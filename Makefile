PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test snapshot fuzz chaos mutation claims lint clean

demo: $(READY)
	$(BIN)/outblas demo

test: $(READY)
	$(BIN)/pytest -n 3

# Compiles the kernels that tests/data/machine_code.json lists and writes what their machine code is now.
snapshot: $(READY)
	$(BIN)/outblas inspect --against tests/data/machine_code.json --update

# Not a part of CI: random calls beside torch's. FUZZ_DEVICE=cuda runs them on a GPU, and named kernels too.
FUZZ_CALLS ?= 40000
FUZZ_SEED ?= 0
FUZZ_DEVICE ?= cpu

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --calls $(FUZZ_CALLS) --seed $(FUZZ_SEED) --device $(FUZZ_DEVICE)

# Not a part of CI either: kills, damaged stores, clock jumps, full disks, shared stores, a shared cache.
CHAOS_SEED ?= 0
CHAOS_SCALE ?= 1

chaos: $(READY)
	$(BIN)/python -m tests.chaos --seed $(CHAOS_SEED) --scale $(CHAOS_SCALE)

# Nor this: plants faults in copies of the sources, each of which a named test has to catch.
mutation: $(READY)
	$(BIN)/python -m tests.mutation

# What the seed documents claim beside what was measured: writes docs/claims.md from results/.
claims: $(READY)
	$(BIN)/python -m docs.seed_claims

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/outblas
	ln -s $(CURDIR)/src/outblas/* $(CURDIR)/autotune $(CURDIR)/hopper $(CURDIR)/kernels $(CURDIR)/turing build/types/outblas/
	mkdir build/types/docs && ln -s $(CURDIR)/docs/seed_claims build/types/docs/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p outblas -p docs.seed_claims
	cd tests && MYPYPATH=$(CURDIR)/build/types:$(CURDIR)/docs $(CURDIR)/$(BIN)/mypy --config-file mypy.ini .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
