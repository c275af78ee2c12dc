# make dev       .venv, pinned dependencies, build of what changed, importable lowtide
# make test      dev, then all C++ tests and the quick Python tests
# make test-all  test, then the slow ones in shards (tests/shards.py --list)
# make demo      dev, then examples/demo.py
# make lint      formatters and type checks
# make bench     benchmarks, JSON and a table
# make wheels    wheels of every torch, Python and with CUDA or not, tried, in dist
#                (TORCH=2.15, PYTHON=3.12, CUDA=ON|OFF for some of them)
#
# Reads: TORCH (2.13, say: that version of torch, in .venv-2.13 and build-2.13), JOBS,
#   LOWTIDE_CUDA (AUTO|ON|OFF), LOWTIDE_CUDA_ARCHS, LOWTIDE_UNITY, LOWTIDE_WERROR.
# Needs: Debian with g++, make, python3-dev and python3-venv (Python >= 3.11).

PYTHON ?= python3
JOBS ?= $(shell nproc)
# What is developed with has .venv, build and python/lowtide; every other version has an
# environment, a build and, in the build, the package: links to its sources.
TORCH ?= 2.15
OTHER := $(filter-out 2.15,$(TORCH))
VENV := .venv$(OTHER:%=-%)
BUILD ?= build$(OTHER:%=-%)
PREFIX := $(if $(OTHER),$(BUILD)/python,python)
LINKS := $(if $(OTHER),$(filter-out %.so %/_built_for.py %/include %/__pycache__,\
  $(wildcard $(CURDIR)/python/lowtide/*)))
# Eight files at once: minutes for who builds once. Who edits one sets it to OFF.
LOWTIDE_UNITY ?= ON
# Warnings of compilers we do not develop with must not break a user's build.
LOWTIDE_WERROR ?= $(if $(CI),ON,OFF)

# Without what they depend on; torchtitan from 0.3 on needs torch 2.12.
FRAMEWORKS := requirements/frameworks.txt \
  requirements/torchtitan-$(if $(filter 2.11,$(TORCH)),0.2,0.3).txt
VERL := requirements/verl.txt
CONSTRAINTS := requirements/constraints.txt

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.torch-$(TORCH)
CMAKE := $(BIN)/cmake
OPTIONS := $(foreach name,LOWTIDE_CUDA LOWTIDE_CUDA_ARCHS LOWTIDE_UNITY LOWTIDE_WERROR,\
  $(if $($(name)),'-D$(name)=$($(name))','-U$(name)'))
# Changed options mean a changed stamp, so they are never ignored.
CONFIGURED := $(BUILD)/.configured-$(shell echo "$(OPTIONS)" | md5sum | cut -c -8)
CPP_FILES = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu' \
  -o -name '*.cuh')
# One build at a time, also when two shells say `make`.
LOCK = flock $(BUILD)/.lock

.PHONY: dev test test-all sanitize demo lint bench wheels clean
.NOTPARALLEL:

dev: $(CONFIGURED)
	$(LOCK) $(CMAKE) --build $(BUILD) -j $(JOBS) --target dev
	$(LOCK) $(CMAKE) --install $(BUILD) --prefix $(PREFIX) > $(BUILD)/install.log
	$(if $(LINKS),find $(PREFIX)/lowtide -maxdepth 1 -type l -delete; \
	  ln -s $(LINKS) $(PREFIX)/lowtide)

test: dev $(BUILD)/.tests
	$(LOCK) $(CMAKE) --build $(BUILD) -j $(JOBS)
	rm -rf $(BUILD)/passed
	GTEST_OUTPUT=xml:$(CURDIR)/$(BUILD)/passed/ \
	  $(BIN)/ctest --test-dir $(BUILD) --verbose --no-tests=error
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
	  --junitxml=$(BUILD)/passed/python.xml
	$(BIN)/python tests/record_versions.py $(BUILD)/passed

test-all: test
	$(BIN)/python tests/shards.py

# The C++ tests under SANITIZE=address (and undefined) or thread, in a build of their own;
# ROOMS="comm ops": those of these folders of tests/cpp.
sanitize: $(INSTALLED)
	$(CMAKE) -S . -B $(BUILD)/$(SANITIZE) -G Ninja -DLOWTIDE_SANITIZE=$(SANITIZE) \
	  -DLOWTIDE_TESTS=ON -DLOWTIDE_CUDA=OFF -DLOWTIDE_UNITY=ON \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(CMAKE) --build $(BUILD)/$(SANITIZE) -j $(JOBS) \
	  --target $(or $(ROOMS:%=%_test),cpp_tests)
	$(BIN)/ctest --test-dir $(BUILD)/$(SANITIZE) --output-on-failure --no-tests=error \
	  $(if $(ROOMS),-R '^cpp\.($(shell echo $(ROOMS) | tr ' ' '|'))$$')

demo: dev
	$(BIN)/python examples/demo.py

lint: dev
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: dev
	$(BIN)/python benchmarks/run.py

# Here TORCH, PYTHON and CUDA, where they are given, are versions to build for.
given = $(if $(filter command,$(origin $(1))),--$(2) $($(1)))
wheels:
	python3 tools/wheels.py $(call given,TORCH,torch) $(call given,PYTHON,python) \
	  $(call given,CUDA,cuda)

clean:
	rm -rf $(BUILD) dist python/lowtide/*.so python/lowtide/_built_for.py

# An existing environment is reused; a changed requirements file, or another torch to
# develop with, updates it.
$(INSTALLED): requirements/build.txt requirements/dev.txt \
    requirements/torch-$(TORCH).txt $(FRAMEWORKS) $(VERL) $(CONSTRAINTS)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo \
	  "lowtide: $(VENV): expected Python >= 3.11 with venv, got an error from" \
	  "$(PYTHON). Run \`apt install python3-venv python3-dev\`." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
	  $(patsubst %,-r %,$(filter-out $(FRAMEWORKS) $(VERL) $(CONSTRAINTS),$^))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  $(patsubst %,-r %,$(FRAMEWORKS))
	rm -rf $(VENV)/verl
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(VENV)/verl -r $(VERL)
	rm -rf $(VENV)/verl/tests
	$(BIN)/python -c "import pathlib, sysconfig; pathlib.Path(\
	sysconfig.get_path('purelib'), 'lowtide-dev.pth').write_text('$(CURDIR)/$(PREFIX)\n')"
	rm -f $(VENV)/.torch-*
	touch $@

$(CONFIGURED): $(INSTALLED)
	rm -f $(BUILD)/.configured-*
	$(CMAKE) -S . -B $(BUILD) -G Ninja $(OPTIONS) \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	touch $@

# `make demo` needs no GoogleTest; from the first `make test` on it is used.
$(BUILD)/.tests: | $(CONFIGURED)
	$(CMAKE) -DLOWTIDE_TESTS=ON $(BUILD)
	touch $@
