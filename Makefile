PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check coverage machine-code snapshot bench-host native wheel-packs fuzz chaos mutation pages docs release-check lint types-of-package types-of-tests clean

demo: $(READY)
	$(BIN)/outblas demo

# Three processes for two cores, for many tests wait for processes of theirs. Tests of one `xdist_group` run in one.
IN_PARALLEL := -n 3 --dist loadgroup

test: $(READY)
	$(BIN)/pytest $(IN_PARALLEL)

# For the inner loop, two minutes: the tests that compile no kernel, interpret none and are not marked `long`.
# `make check TESTS=tests/hopper` runs all tests of a folder, or of a file, instead.
TESTS ?= -m 'not (gpu or slow or compile or interpreter or long)'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -q -n 2 $(TESTS)

# The suite of `make test` under coverage, which takes about twice as long. Fails where less than 90% of the branches
# of host code are taken; pyproject.toml names what is left out, and why. COVERAGE_TESTS selects tests.
COVERAGE_LEAST ?= 90
COVERAGE_TESTS ?=

coverage: $(READY)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest $(IN_PARALLEL) -o timeout=900 $(COVERAGE_TESTS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report
	$(BIN)/coverage json -q -o build/coverage/report.json
	$(BIN)/python .ci/branch_coverage.py build/coverage/report.json $(COVERAGE_LEAST)

# Compiles every kernel that tests/data/machine_code.json lists; fails where its machine code is another than listed.
machine-code: $(READY)
	$(BIN)/python -m tools.machine_code

# Compiles the same kernels and writes what their machine code is now.
snapshot: $(READY)
	$(BIN)/python -m tools.machine_code --update

# What outblas costs the host, beside torch. BENCH_HOST='--against DIR' measures another checkout in turns with this
# one, and fails where a call of this one is slower.
BENCH_HOST ?=

bench-host: $(READY)
	$(BIN)/python -m tools.host $(BENCH_HOST)

# Builds the C++ module outblas_native into build/native for the torch that is installed, and runs the tests of eager
# calls, of layers and of `enable` with it. NATIVE_TESTS selects others.
NATIVE_TESTS ?= tests/torch_ops/test_native.py tests/torch_ops/test_eager.py tests/torch_ops/test_observers.py \
    tests/torch_ops/test_autograd.py tests/torch_ops/test_enable.py tests/torch_ops/test_plan_keys.py \
    tests/api/test_nn.py

NATIVE_PROCESSES ?= 2

native: build/native/.built
	PYTHONPATH=build/native $(BIN)/pytest -n $(NATIVE_PROCESSES) -m 'not gpu and not slow' $(NATIVE_TESTS)

build/native/.built: $(READY) $(wildcard native/src/*) native/setup.py
	mkdir -p build/native
	cd native && ../$(BIN)/python setup.py -q build_ext --build-lib ../build/native --build-temp ../build/native-objects
	touch $@

# The packs that the wheel carries, in src/outblas/packs: half an hour of two idle cores, without a GPU. They are built
# with the DSL's libraries for CUDA 12, whose code newer drivers run too: the DSL takes them where the driver is of
# CUDA 12, as the one that is compiled here says. WHEEL_PACKS=--dry-run compiles nothing; it also names kinds.
WHEEL_PACKS ?=

wheel-packs: build/driver12/libcuda.so.1
	LD_LIBRARY_PATH=$(<D) $(BIN)/python -m tools.wheel_packs $(WHEEL_PACKS)

build/driver12/libcuda.so.1: $(READY)
	mkdir -p $(@D)
	echo 'int cuDriverGetVersion(int *version) { return *version = 12090, 0; }' | $(CC) -shared -fPIC -x c -o $@ -

# Not a part of CI: random calls beside torch's. FUZZ_DEVICE=cuda runs them on a GPU, and named kernels too.
FUZZ_CALLS ?= 40000
FUZZ_SEED ?= 0
FUZZ_DEVICE ?= cpu

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --calls $(FUZZ_CALLS) --seed $(FUZZ_SEED) --device $(FUZZ_DEVICE)

# Not a part of CI either: what the tuner promises, with as many kills of drivers.
KILLS ?= 200

chaos: $(READY)
	PROMISES=$(KILLS) $(BIN)/pytest -q -s tests/autotune/test_tuner_promises.py

# Nor this: plants faults of barriers in copies of the kernels, each of which a named test has to catch.
mutation: $(READY)
	$(BIN)/python -m tests.mutation

# What README and the pages of docs/ show of results/: tables between markers, and charts.
pages: $(READY)
	$(BIN)/python -m tools.pages

# The pages of docs/ as HTML in build/html; a warning is an error. DOCS='-t offline' asks no other site for its index.
DOCS ?= -t offline

docs: $(READY)
	$(BIN)/sphinx-build -b html -W --keep-going -j auto $(DOCS) -d build/doctrees docs build/html

# Builds the wheel and the sdist in a temporary folder, and checks what an index and a user would get. Takes minutes.
# RELEASE='--tag v1.2.3' checks a tree that is about to be tagged, RELEASE='--only readme' runs one of the checks.
RELEASE ?=

release-check: $(READY)
	$(BIN)/python -m tests.release $(RELEASE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(MAKE) --no-print-directory -j2 --output-sync types-of-package types-of-tests

types-of-package:
	MYPYPATH=src:tests/data $(BIN)/mypy -p outblas -p docs._ext -p tools -m _outblas_command -m typed_program -m typed_mistakes

types-of-tests:
	cd tests && MYPYPATH=$(CURDIR)/src:$(CURDIR) $(CURDIR)/$(BIN)/mypy --config-file mypy.ini .

# uv installs in a fraction of pip's time, and links later environments to the files of the first. It reads none of
# pip's settings: where pip finds wheels in a folder, uv is told so, and it trusts the system's certificates.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_NATIVE_TLS ?= true

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt torch -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
