PYTHON ?= python

.DEFAULT_GOAL := help
.PHONY: help lint format test regress check check-all docs wheel profile validate figures bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

lint: ## formatting, ruff and strict types; changes nothing
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m ruff check
	$(PYTHON) -m mypy

format: ## format the code, and mend what ruff can mend
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

test: ## the tests that are not slow
	$(PYTHON) -m pytest

regress: ## compare every shipped policy's figures with tests/baseline.yaml (half a minute)
	$(PYTHON) -m flowsim.regress --baseline tests/baseline.yaml

check: lint test ## what has to pass before a commit: lint and test

check-all: lint ## check, and everything slow: slow tests, the baseline, the documentation site, the wheel
	$(PYTHON) -m pytest -m "slow or not slow"
	$(MAKE) regress
	$(MAKE) docs
	$(MAKE) wheel

docs: ## build the documentation site in site/; a warning fails it (extra docs)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

wheel: ## build the wheel and run it in a fresh virtual environment, from another folder
	@set -eu; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; unset PYTHONPATH; \
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir "$$work/dist" .; \
	$(PYTHON) -m venv "$$work/venv"; \
	"$$work/venv/bin/python" -m pip install --quiet "$$work"/dist/*.whl; \
	mkdir "$$work/elsewhere"; cd "$$work/elsewhere"; \
	"$$work/venv/bin/python" -m flowsim +policy=flowprefill +workload=mixed workload.num_requests=500; \
	"$$work/venv/bin/flowsim" policy=fcfs workload=uniform workload.num_requests=500 hydra.run.dir=out quiet=true; \
	test -s out/requests.csv; test -s out/summary.json

profile: ## refit the shipped profiles and the length tables from the data that FLOWSIM_DATA names (minutes)
	$(PYTHON) -m experiments.make_profiles
	$(PYTHON) -m experiments.mixed_quantiles
	$(PYTHON) -m experiments.length_tables

figures: ## reproduce the paper: experiments/results/, docs/img/paper_*.png, docs/reproduction.md (minutes)
	$(PYTHON) -m experiments.reproduction --run

validate: ## hold the simulator against all that is real or exact; writes docs/validation.md
	$(PYTHON) -m experiments.validate

bench: ## speed beside SimPy's own, growth, clusters that decode, a search, start-up; beside sched-sim where PEER_PYTHON names its interpreter (minutes)
	$(PYTHON) -m benchmarks.simulate
	$(PYTHON) -m benchmarks.counts
	$(PYTHON) -m benchmarks.scale --turns 3
	$(PYTHON) -m benchmarks.scale --counts 1000000 --keep requests sample summary
	$(PYTHON) -m benchmarks.serving
	$(PYTHON) -m benchmarks.search
	$(PYTHON) -m benchmarks.startup
	$(PYTHON) -m benchmarks.sweep
	$(if $(PEER_PYTHON),$(PYTHON) -m benchmarks.peers --peer-python $(PEER_PYTHON))
