# make train   set up, train the quickstart model, generate text
# make test    the test suite      make lint   style, types, import order
# make test-long   the full matrices of kills, sabotage and torch.compile
# make test-versions   the core of the suite with the lowest and with the newest versions that pyproject.toml allows
# make bench   kernels and decoding against dense attention, on a GPU      make test-gpu   kernels at real sizes, on a GPU
# make docs    the guide and the reference as a site in build/docs
# make setup   only the environment in .venv

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip would compile 13,000 files one after the other. A quarter of the time goes to tests and to packages that nothing
# here imports. Some packages contain templates that are not valid Python.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing|networkx|pip)/' $(VENV)/lib || true
RUN    := runs/quickstart

.PHONY: train test test-package test-kernels test-gpu test-long test-versions test-lowest test-newest bench docs lint setup setup-dev clean

train: setup
	$(BIN)/nsa train configs/quickstart.yaml train.out_dir=$(RUN)
	@$(BIN)/nsa generate $(RUN) --prompt "def main(" --max-tokens 240 --seed 1 --beside-untrained
	@echo "Everything is in $(RUN): model.safetensors, config.yaml, training.csv, metrics.json." \
	      "More text: $(BIN)/nsa generate $(RUN) --prompt 'class '"

# Triton's interpreter is switched on for a whole process, which must not see a GPU: the tests would run on that.
# tests/conftest.py shares the tests out to the workers: six for two cores, since many tests wait. Rewriting all
# asserts takes 6 s in each, so compiled files are kept.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder
test: setup-dev
	$(MAKE) --no-print-directory -j 2 test-package test-kernels

# Side by side: most tests of one half wait for processes while those of the other compute.
test-package:
	$(PYTEST) -n 4 --ignore=tests/ops/triton
test-kernels:
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) -n 2 tests/ops/triton

# Most of a GPU test is compiling its kernels: several processes share one GPU.
test-gpu: setup-dev
	$(BIN)/python -m pytest -n 8 -m gpu tests/ops/triton tests/record tests/nn tests/generate tests/train

# The full matrices of docs/reliability.md: before a release.
test-long: setup-dev
	$(PYTEST) -n 2 -m long --ignore=tests/ops/triton
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) -n 2 -m long tests/ops/triton
	$(PIP) trl lm_eval
	$(PYTEST) -n 2 tests/hf tests/docs

# The core: operators, layers, checkpoints, training, one run of DDP and of FSDP, the wheel. Each set of versions has an
# environment of its own in build/, which takes several GB: the newest PyTorch comes with CUDA.
CORE := tests/ops tests/nn tests/checkpoint tests/train tests/faults/test_kills.py tests/packaging
test-versions: test-lowest test-newest

test-lowest test-newest: test-%:
	test -d build/$* || $(PYTHON) -m venv build/$*
	$(if $(filter lowest,$*),$(PYTHON) scripts/lowest_versions.py,true) > build/$*.txt
	build/$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -c build/$*.txt -e '.[dev]'
	build/$*/bin/python -m pip freeze --exclude-editable | grep -iE '^(torch|triton|transformers|numpy|safetensors)='
	build/$*/bin/python -m pytest -n 2 --dist loadscope --ignore=tests/ops/triton $(CORE)

bench: setup
	$(BIN)/python -m bench.attention
	$(BIN)/python -m bench.decode
	$(BIN)/python -m bench.generate

docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "Open build/docs/index.html; for the search: $(BIN)/python -m http.server --directory build/docs"

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

setup: $(VENV)/installed
setup-dev: $(VENV)/installed-dev

# A stamp per dependency set: nothing is installed again until what it depends on changes.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[train]'
	@$(COMPILE)
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
