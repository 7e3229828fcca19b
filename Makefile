# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: quickstart install check lint test test-models

quickstart: install  ## train a small GPT: on the GPUs, or on 2 CPU processes where there are none
	$(BIN)/mgpu train configs/quickstart.yaml

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

install: $(STAMP)  ## .venv with mgpu (editable) and the development extras

lint: install  ## style, types, layers
	$(BIN)/ruff check mgpu tests scripts
	$(BIN)/ruff format --check mgpu tests scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## the quick tier
	$(BIN)/python -m pytest -q -m 'not slow'

test: lint  ## everything that can run here
	$(BIN)/python -m pytest

# torchvision has no build for the CPU torch that constraints.txt pins, and timm needs it: both get an environment of their own.
MODELS := .venv-models
MODELS_STAMP := $(MODELS)/.installed

$(MODELS_STAMP): pyproject.toml
	test -x $(MODELS)/bin/python || $(PYTHON) -m venv $(MODELS)
	$(MODELS)/bin/python -m pip install --quiet torch==2.14.1 torchvision==0.29.1 timm pytest pytest-timeout hypothesis -e .
	touch $(MODELS_STAMP)

test-models: $(MODELS_STAMP)  ## models of torchvision and timm by every strategy (5.5 GB of packages, once)
	$(MODELS)/bin/python -m pytest tests/parallel/test_vision_models.py --durations=0
