# Everything a newcomer needs: `make demo` runs the main job, `make test` passes the tests.
# `make test TL=3.9` does so on that version of TransformerLens, in an environment of its own.
PYTHON ?= python3
TL ?=
VENV ?= .venv$(TL:%=-%)
BIN := $(VENV)/bin
CONSTRAINTS := constraints$(TL:%=-%).txt
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
OUT ?= runs/addition
FORM ?= placeholder

# Where this is set, every process compiles torch and all else that it imports anew: 7 seconds each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo lab test check contract lint docs doctor gallery notebooks clean

demo: $(VENV)/.installed
	$(BIN)/sparse-tl addition --form $(FORM) --out $(OUT)

# The notebooks, in a browser; the built-in models come with the package, so nothing is trained.
lab: $(VENV)/.installed
	$(BIN)/jupyter lab notebooks

# One process per core; more threads each would only stand in each other's way.
test: $(VENV)/.installed
	$(PYTEST)

# The tests, and the notebooks from end to end; these come first, as they take longest.
check: $(VENV)/.installed
	$(PYTEST) notebooks tests

# What differs between versions of TransformerLens: the seam to it, and the main job on top.
contract: $(VENV)/.installed
	$(PYTEST) tests/lens tests/cli/test_addition_command.py

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# The site is in site/: open site/index.html; `mkdocs serve` shows it while you write.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

doctor: $(VENV)/.installed
	$(BIN)/sparse-tl doctor

# All figures, from real runs of the built-in models.
gallery: $(VENV)/.installed
	$(BIN)/python docs/gallery.py --runs runs/gallery

# Runs the notebooks and stores them with pictures in place of interactive figures.
notebooks: $(VENV)/.installed
	$(BIN)/python notebooks/store.py

# A new pip finds packages in half the time of the one that venv brings, and compiling all of them
# ahead of use takes as long again. torch comes before the others: the constraint names a build that
# they must not replace.
$(VENV)/.installed: pyproject.toml constraints.txt $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) torch
	$(INSTALL) --editable '.[dev,notebooks,docs]'
	touch $@

clean:
	rm -rf $(VENV)
