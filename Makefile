# `make` lists what there is. `TL=3.9` after any target uses that version of TransformerLens.
PYTHON ?= python3
TL ?=
VENV ?= .venv
BIN := $(VENV)$(TL:%=-%)/bin
PIP := $(VENV)/bin/python -m pip
INSTALL := install --quiet --no-compile --constraint
# Cases of each parametrised test: a number, drawn anew every day, or all.
CASES ?= $(if $(filter check,$(MAKECMDGOALS)),all,1)
# A test marked long runs every so many days.
TURNS ?= 1
# A crashed worker that is started again leaves pytest waiting for ever.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --max-worker-restart 0 \
	--durations 15 --durations-min 5 --cases $(CASES) --turns $(TURNS)
INSTALLED := $(VENV)$(TL:%=-%)/.installed
TOOLS := $(VENV)$(TL:%=-%)/.tools
OUT ?= runs/addition
FORM ?= placeholder

# Where this is set, every process compiles torch and all else that it imports anew: 7 seconds each.
unexport PYTHONDONTWRITEBYTECODE

define HELP
make demo            the whole method on addition: dense model, sparse model, figure (4 to 8 minutes)
make demo-lm         the same on SmolLM2, in a short run (up to an hour)
make lab             the notebooks, in a browser
make language-model  downloads SmolLM2-135M-Instruct (93 MB)
make test            the fast tests
make check           all tests in all their cases, and the notebooks; CASES=1 draws a case of each
make contract        what differs between versions of TransformerLens; TL=3.9 for one
make lint            style, types, import layers
make docs            the site, into site/
make doctor          what works on this machine
make gallery         all figures of the docs, from real runs
make notebooks       runs the notebooks and stores them with pictures
make clean           removes the environments
endef
export HELP

.PHONY: help demo demo-lm lab language-model test check contract lint docs doctor gallery notebooks clean

help:
	@echo "$$HELP"

demo: $(INSTALLED)
	$(BIN)/python -m sparse_tl addition --form $(FORM) --out $(OUT)

# The same on a real language model, at a small size: a few steps, on text that it writes itself and IOI.
demo-lm: language-model
	$(BIN)/python -m sparse_tl post-train --model smollm2 --text own --task ioi --target-loss kl+0.1 \
		--own-windows 240 --window 64 --batch-size 6 --steps 80 \
		--prompt "When Mary and John went to the store, John gave a drink to" --out runs/smollm2
	@echo "The model that comes with the package was trained for ten hours, and has 62 to 81x fewer edges in windows" \
		"of 256 tokens: load_language_models(). See runs/smollm2/circuit_diagram.html."

# The notebooks, in a browser; the built-in models come with the package, so nothing is trained.
lab: $(TOOLS)
	@$(BIN)/jupyter lab notebooks $(LAB_ARGS) || { [ $$(id -u) != 0 ] \
		|| echo "As root, as in a container: make lab LAB_ARGS=--allow-root"; exit 1; }

# SmolLM2-135M-Instruct, for the tests of a real language model; without it they are skipped.
language-model: $(INSTALLED)
	$(BIN)/python -m sparse_tl get smollm2

# The fast tests. One process per core; more threads each would only stand in each other's way.
test: $(TOOLS)
	$(PYTEST) -m 'not slow and not long'

# All tests, and the notebooks from end to end; these come first, as they take longest.
check: $(TOOLS)
	$(PYTEST) $(if $(filter all,$(CASES)),-m '') notebooks tests

# What differs between versions of TransformerLens: the seam to it, what only HookedTransformer has
# (bidirectional attention, masks of -1e5, fewer outputs than tokens), and the main job on top.
# Files in the GGUF format are read before TransformerLens has a part in it.
contract: $(TOOLS)
	$(PYTEST) --ignore-glob 'tests/backend/test_gguf*' tests/backend tests/gates/test_numbers.py \
		tests/gates/test_masks.py tests/head_roles/test_models.py \
		tests/circuits/test_trace.py tests/explorer/test_exploration.py \
		tests/cli/test_addition_command.py::test_addition_writes_everything

lint: $(TOOLS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

# The site is in site/: open site/index.html; `mkdocs serve` shows it while you write.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

doctor: $(TOOLS)
	$(BIN)/python -m sparse_tl doctor

# All figures, from real runs of the built-in models.
gallery: $(TOOLS)
	$(BIN)/python docs/gallery.py --runs runs/gallery

# Runs the notebooks and stores them with pictures in place of interactive figures.
notebooks: $(TOOLS)
	$(BIN)/python notebooks/store.py

# A new pip finds packages in half the time of the one that venv brings, and compiling all of them
# ahead of use takes as long again. torch comes before the others: the constraint names a build that
# they must not replace.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) $(INSTALL) constraints.txt torch
	$(PIP) $(INSTALL) constraints.txt --editable '.[gguf]'
	touch $@

# What notebooks, tests and docs need besides, which takes as long as the package.
$(VENV)/.tools: $(VENV)/.installed
	$(PIP) $(INSTALL) constraints.txt --editable '.[dev,notebooks,docs]'
	touch $@

# Another version of TransformerLens has an environment that sees everything else of the first one.
$(VENV)-%/.installed: constraints-%.txt $(VENV)/.installed
	rm -rf $(@D)
	$(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/python -c 'import sysconfig as s; first = s.get_path("purelib").replace("$(@D)", "$(VENV)"); \
	  open(s.get_path("purelib") + "/first.pth", "w").write(f"import site; site.addsitedir({first!r})")'
	$(PIP) --python $(BIN)/python $(INSTALL) $< transformer-lens
	touch $@

$(VENV)-%/.tools: $(VENV)-%/.installed $(VENV)/.tools
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-*
