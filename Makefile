# Every target makes .venv by itself when it is missing or older than pyproject.toml or constraints.txt.
# Needed beforehand: make and Python 3.11 or newer (`make PYTHON=/path/to/python3` chooses one).

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv/.peers
INTEGRATIONS := .venv-integrations/.installed
# The oldest and the newest transformers that pyproject.toml allows, and the tests that depend on its names.
TRANSFORMERS := 5.10.4 5.24.0
TRANSFORMERS_TESTS := tests/generation tests/parallel/context/test_context_ranks.py \
    tests/parallel/tensor/test_tensor_families.py tests/parallel/pipeline/test_pipeline_families.py \
    tests/api/test_export.py tests/checkpoint/test_pretrained.py \
    tests/engine/extensions/test_activation_checkpointing.py
VERL := .venv-verl/.installed
DOCS := .venv/.docs
WORKERS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-all test-integrations test-verl test-newest fuzz soak check size replay board museum bench bench-check gpu models parity docs docs-links clean

test test-all test-integrations test-verl check bench-check docs: export OMP_NUM_THREADS = 1
# Compiled once, not by every process that a test starts (`make clean` removes what is written).
test test-all test-integrations test-verl check bench-check docs: export PYTHONDONTWRITEBYTECODE =

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)$$/  make \1\t\2/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "shardwise needs Python 3.11 or newer. Say which: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing into .venv"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps vit-pytorch
	@# Apart from the rest: transformers imports torchao, slowly, wherever it finds it. Only tests/common/blockwise.py looks there.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
	    --target .venv/torchao torchao
	@touch $@

venv: $(STAMP) ## make or refresh .venv

demo: $(STAMP) ## train a small GPT with ZeRO-3 on every local device (CPU: two processes)
	@$(BIN)/shardwise train

PARALLEL := -n $(WORKERS) --dist worksteal
MOST := -m 'not gpu and not long and not integrations'

test: $(STAMP) ## all that needs no GPU, but for long cases, nine of ten slow ones, each week others (tests/dear.py), pages (make docs), scripts (make bench-check)
	@$(BIN)/python -m pytest $(MOST) $(PARALLEL) --ignore=tests/docs --ignore=tests/bench --durations=25 \
	    --durations-file=build/durations.json

test-all: $(PEERS) ## everything: long cases, every preset and transport, pages, scripts, peers; GPU tests where there is one
	@$(BIN)/python -m pytest -m 'not integrations' --every-case $(PARALLEL) --durations-file=build/durations-all.json

bench-check: $(STAMP) ## test the scripts that measure, plan and compare (bench)
	@$(BIN)/python -m pytest $(MOST) $(PARALLEL) tests/bench

$(INTEGRATIONS): $(STAMP)
	@test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
	@echo "installing other people's trainers into .venv-integrations"
	@.venv-integrations/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,integrations]'
	@touch $@

# Found through PYTHONPATH before the version in an environment.
.venv/transformers-%/.installed: $(STAMP)
	@echo "installing transformers $* into .venv/transformers-$*"
	@grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venv/constraints-transformers.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c .venv/constraints-transformers.txt --upgrade \
	    --target .venv/transformers-$* transformers==$*
	@touch $@

test-integrations: $(INTEGRATIONS) $(TRANSFORMERS:%=.venv/transformers-%/.installed) ## transformers, TRL, Accelerate, Lightning, Ray under our plans beside one process
	@.venv-integrations/bin/python -m pytest -m integrations -n $(WORKERS) --dist worksteal
	@PYTHONPATH=.venv/transformers-$(lastword $(TRANSFORMERS)) .venv-integrations/bin/python -m pytest -n $(WORKERS) \
	    tests/integrations/test_transformers_trainer.py tests/integrations/test_trl_preference.py
	@for version in $(TRANSFORMERS); do echo "with transformers $$version"; \
	    PYTHONPATH=.venv/transformers-$$version $(BIN)/python -m pytest $(TRANSFORMERS_TESTS) \
	    -m 'not gpu and not long and not integrations' -n $(WORKERS) --dist worksteal || exit 1; done

$(VERL): $(STAMP)
	@test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	@echo "installing verl, which asks for an older transformers, into .venv-verl"
	@grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venv-verl/constraints.txt
	@.venv-verl/bin/python -m pip install -qq --disable-pip-version-check -c .venv-verl/constraints.txt -e '.[dev,verl]'
	@rm -rf .venv-verl/lib/python*/site-packages/tests # verl 0.9.1 installs its tests as a package, which hides ours
	@touch $@

test-verl: $(VERL) ## verl's training engine under our plans beside one process
	@.venv-verl/bin/python -m pytest -m integrations tests/integrations/test_verl.py

test-newest: $(STAMP) ## build wheel and sdist; try the wheel with the newest version of everything but torch (needs the network)
	@$(BIN)/python -m pytest -q -s tests/package/newest.py

FIRST ?= $(shell date +%s)
COUNT ?= 200

fuzz: $(STAMP) ## random programs beside one plain process, FSDP2 as the judge of what is legal (FIRST=seed COUNT=200)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FIRST) $(COUNT) --shrink

soak: $(STAMP) ## long proofs: 200 kills at random points survived, 30,000 changed files (ARGS="kills --seed 1")
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.reliability.soak $(ARGS)

check: $(STAMP) ## format, lint, types, floors and the tests that start no ranks, in seconds
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyrefly check --summary=none
	@$(BIN)/lint-imports --no-cache > .venv/lint-imports.log 2>&1 || { cat .venv/lint-imports.log; exit 1; }
	@$(BIN)/python -m pytest -q --quick tests -m 'not gpu and not slow and not long and not integrations'

$(PEERS): $(STAMP)
	@echo "installing the peers"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[peers]'
	@touch $@

size: $(STAMP) ## lines by package, largest classes and functions, import cycles: a report, nothing fails
	@$(BIN)/python -m bench.size

validate: $(STAMP) ## published measurements beside predicted ones: error by source, wrong verdicts, baselines
	@$(BIN)/python -m bench.validate

replay: $(STAMP) ## the runs on record (tests/replay) once more: shows what differs; ARGS=--write puts them on record
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.replay $(ARGS)

board: $(STAMP) ## inject every fault of the board of reliability; writes bench/results/reliability.md (ARGS="A1 B" for some)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.reliability $(ARGS) --write

museum: $(STAMP) ## plant every bug of the museum of silent bugs; writes bench/results/museum.md (ARGS="norm --clean" for some)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.museum $(ARGS)

bench: $(PEERS) ## compare with torch's own engines and DeepSpeed; writes bench/results/DATE.md and .json
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.targets --profile

gpu: $(STAMP) ## on a machine with GPUs: tests marked gpu, then our engines beside torch's; writes bench/results/DATE-gpu.md
	@gpus=$$($(BIN)/python -W ignore -m bench.gpu --count) || exit 2; \
	    rm -f .venv/gpu-tests.xml; \
	    $(BIN)/python -m pytest -m gpu -q --junitxml=.venv/gpu-tests.xml tests; tests=$$?; \
	    $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $$gpus -m bench.gpu \
	    --tests .venv/gpu-tests.xml && exit $$tests

models: $(STAMP) ## train every model of the matrix under every strategy; writes bench/results/models.md
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python bench/models.py

parity: $(STAMP) ## train every product of parallel degrees beside one process; writes bench/results/parity.md
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python bench/parity_table.py

$(DOCS): $(STAMP)
	@echo "installing what makes the site"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS) ## test the pages, and make the site: build/site/index.html. A warning is an error, as a link to nowhere is
	@$(BIN)/python -m pytest $(MOST) $(PARALLEL) tests/docs
	@$(BIN)/python -m sphinx -q -W --keep-going -j 2 -c docs . build/site
	@echo "build/site/index.html"

docs-links: $(DOCS) ## follow the links to other sites, which needs the network
	@$(BIN)/python -m sphinx -q -b linkcheck -c docs . build/links

clean: ## remove .venv, caches and build results (runs/ stays)
	@rm -rf .venv .venv-integrations .venv-verl build dist docs/reference .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
