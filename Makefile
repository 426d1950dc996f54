# make train   set up, train the quickstart model, let it write
# make test    the whole test suite      make lint   style, types, import arrows
# make test-long   the full matrices of kills and of torch.compile, half an hour
# make bench   kernels against dense attention, on a GPU      make test-gpu   kernels at real sizes, on a GPU
# make setup   only the environment in .venv

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN    := runs/quickstart

.PHONY: train test browser test-gpu test-long bench lint setup setup-dev clean

train: setup
	$(BIN)/nsa train configs/quickstart.yaml train.out_dir=$(RUN)
	@$(BIN)/nsa generate $(RUN) --prompt "def main(" --max-tokens 240 --beside-untrained
	@echo "Everything is in $(RUN): model.safetensors, config.yaml, training.csv, metrics.json." \
	      "More text: $(BIN)/nsa generate $(RUN) --prompt 'class '"

# Tests that start several processes come by themselves: they would disturb those that watch the clock. Some share
# folders of runs, so a file stays on one worker.
PROCESSES := tests/distributed tests/faults tests/checks tests/scripts
test: setup-dev browser
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/ops/triton $(PROCESSES:%=--ignore=%)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PROCESSES)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/ops/triton

# The page of `nsa report` is opened in a real browser, installed where that is allowed.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get -qq update >/dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive \
	  apt-get -qq install -y --no-install-recommends chromium >/dev/null 2>&1; } || true

# Most of a GPU test is compiling its kernels: several processes share one GPU.
test-gpu: setup-dev
	$(BIN)/python -m pytest -n 8 -m gpu tests/ops/triton tests/record

# The full matrices behind docs/reliability.md: before a release.
test-long: setup-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long tests
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long tests/ops/triton

bench: setup
	$(BIN)/python -m bench.attention

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
	$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
