# Everything here sets itself up: it needs python3 (3.10 to 3.13) with its venv module, make, and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 30
JOBS ?= 2

# Packages installed without bytecode make every import of TensorFlow take 5 s instead of 2.
unexport PYTHONDONTWRITEBYTECODE PIP_NO_COMPILE PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup baselines observed demo test slow check docs outputs dist bench compat scorecard evidence everyday outside sensitivity fuzz features findings surprises plan-accuracy clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

setup: $(STAMP)  ## make the environment in .venv (once, and again when pyproject.toml changes)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { \
		echo "Python 3.10 to 3.13 is needed. Received: PYTHON=$(PYTHON), $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12" >&2; \
		exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"  # the first that reads dependency groups
	$(BIN)/python -m pip install --quiet --compile --editable ".[tensorflow]" --group dev
	@touch $@

demo: $(STAMP)  ## verify a correct program, and fix a wrong one, on emulated GPUs
	$(BIN)/gpudist demo

test: $(STAMP)  ## run the tests but those marked slow
	$(BIN)/python -m pytest -q -n $(JOBS) --maxschedchunk 4 --durations 20 -m "not slow"  # heavy tests lie side by side: few at a time

slow: $(STAMP)  ## run the tests marked slow: longer proofs of what make test looks at
	$(BIN)/python -m pytest -q -n $(JOBS) -m slow

check: $(STAMP)  ## formatting, lint, types, layers, docstrings, dependencies, scripts, GitHub's files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pydoclint --quiet emulate gpudist_core
	$(BIN)/deptry .
	$(BIN)/shellcheck .ci/run ci/gpu.sh ci/slurm.sbatch
	$(BIN)/shellcheck --external-sources findings/run findings/*.sh
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	@if command -v actionlint; then PATH=$(BIN):$$PATH actionlint; else \
		echo "actionlint is not installed, so .github/workflows is checked by the workflow cpu alone: github.com/rhysd/actionlint"; fi

dist: $(STAMP)  ## build the wheel and the source archive, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

docs: $(STAMP)  ## build the documentation into docs/_build/html; a warning, a link to nowhere or a page out of date is an error
	$(BIN)/python -m docs.surprises --check
	$(BIN)/python -m sphinx -b html --fail-on-warning --keep-going --quiet docs docs/_build/html

outputs: $(STAMP)  ## verify again what the documentation shows; writes docs/outputs
	$(BIN)/python -m docs.outputs

bench: $(STAMP)  ## measure everything that is claimed; writes benchmarks/results.json and docs/benchmarks.md
	$(BIN)/python -m benchmarks

compat: $(STAMP)  ## try each supported pair of TensorFlow and Keras in .compat; ARGS="--only tf2.18" tries one
	$(BIN)/python -m benchmarks.compat $(ARGS)

scorecard: $(STAMP)  ## judge the corpus; fails where it is worse than the stored figures. ARGS="--only WORD", "--fix", "--fresh", "--store"
	$(BIN)/python -m benchmarks.scorecard $(ARGS)

evidence: $(STAMP)  ## keep all runs of the corpus, to try a judge on them: python -m benchmarks.evidence judge. ARGS="--only WORD", "--jobs N"
	$(BIN)/python -m benchmarks.evidence record $(ARGS)

observed: $(STAMP)  ## verify the wrong programs of the collection that have changed; writes their stage and error to its index
	$(BIN)/python -m benchmarks.observed $(ARGS)

baselines: $(STAMP)  ## run the collection with plain TensorFlow, and judge it as people do without gpudist; writes docs/baselines.md. ARGS="--only WORD", "--fresh"
	$(BIN)/python -m benchmarks.baselines $(ARGS)

everyday: $(STAMP)  ## draw 400 ordinary right programs and judge them; fails where one is accused. ARGS="--seed N", "--bugs", "--shrink MINUTES"
	$(BIN)/python -m benchmarks.everyday $(ARGS)

outside: $(STAMP)  ## verify the training loops of other packages, each in its own environment; writes docs/outside.md. ARGS="NAME ..."
	$(BIN)/python -m benchmarks.outside $(ARGS)

sensitivity: $(STAMP)  ## plant errors of 1 to 1,000 times the noise floor; writes the chart of the docs
	$(BIN)/python -m benchmarks.scorecard.sensitivity

fuzz: $(STAMP)  ## compose programs for MINUTES and keep each that is judged wrongly, shrunk, in .scorecard/fuzz
	$(BIN)/python -m benchmarks.scorecard.fuzz --minutes $(MINUTES) $(ARGS)

features: $(STAMP)  ## verify every feature of gpudist_core and of plain Keras on every topology; writes docs/features.md
	$(BIN)/python -m benchmarks.features

findings:  ## show the surprises of TensorFlow and Keras again; fails where one is gone. ARGS="NAME", NEWEST=1, KEEP=FOLDER
	PYTHON=$(PYTHON) FINDINGS_NEWEST=$(NEWEST) KEEP=$(KEEP) findings/run $(ARGS)

surprises: $(STAMP)  ## write docs/explanation/surprises.md from the headers of findings/
	$(BIN)/python -m docs.surprises

plan-accuracy: $(STAMP)  ## predict published throughputs, one source left out at a time, and write the table; DATA=FILE predicts a file of that form
	$(BIN)/python -m $(if $(DATA),benchmarks.plan_accuracy --data "$(DATA)",benchmarks.plan_left_out --store)

clean:  ## remove what the other targets made
	rm -rf $(VENV) .compat build dist docs/_build docs/causes .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
