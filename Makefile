# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Needs Python 3.11+, git and make; everything else goes into .venv from pinned versions.

# The first that runs and is of a supported version (a name on the PATH may be a shim with nothing behind it).
FITS := import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python; do \
            $$p -c '$(FITS)' >/dev/null 2>&1 && { command -v $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test kills sameness sameness-ptx check format docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.train: pyproject.toml constraints.txt tools/setup.py
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 found; install one, or: make PYTHON=/path/to/python"; exit 1; }
	@"$(PYTHON)" tools/setup.py $(VENV) train
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@"$(PYTHON)" tools/setup.py $(VENV) dev
	@touch $@

demo: $(VENV)/.train  ## train the embedded model on mathematics, on this machine, in two minutes
	@$(BIN)/trimtab demo

test: $(VENV)/.dev  ## all tests that this machine can run
	@$(BIN)/python tools/test.py

kills: $(VENV)/.dev  ## kill -9 real runs at 100 random instants, resume them, compare every loss
	@$(BIN)/python -m tests.real.kills --count 100

sameness: $(VENV)/.dev  ## compare the losses of this tree and PARENT=commit bit by bit, in some minutes
	@$(BIN)/python -m tools.sameness $(if $(PARENT),--parent $(PARENT)) $(if $(ONLY),--only '$(ONLY)')

sameness-ptx: $(VENV)/.dev  ## compare what this tree and PARENT=commit ask of a CUDA GPU, without one
	@$(BIN)/python -m tools.sameness.ptx $(if $(PARENT),--parent $(PARENT)) $(if $(ONLY),--only '$(ONLY)') $(addprefix --renamed ,$(RENAMED))

check: $(VENV)/.dev  ## lint, types, the import contract and wording, in a minute
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python -m tools.import_contract && $(BIN)/python -m tools.wording

format: $(VENV)/.dev  ## let ruff put the code in order
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: $(VENV)/.dev  ## write the generated reference pages again
	@$(BIN)/python tools/docs.py

clean:  ## remove the environment and caches; run folders stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache .sameness build dist
