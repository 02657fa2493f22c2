# make demo   train the built-in task, average, evaluate, translate a few sentences, write the page
# make check  lint, types, the tests that take a moment: what to run while you work
# make test   lint, types, all tests
# make reliability   runs killed, stopped, starved and damaged; a table (16 minutes to an hour)
#
# Both make .venv first, from the first python3 on PATH that is new enough, or from PYTHON=...

NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
PIP = .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
PYTEST = .venv/bin/python -m pytest -n 2 --dist worksteal
PINS = pyproject.toml constraints.txt
RUN = runs/demo

.PHONY: demo lint check test reliability clean

demo: .venv/installed
	.venv/bin/python train.py --config configs/demo.py --workdir $(RUN)
	rm -rf $(RUN)/averaged
	.venv/bin/flaxformer-min average $(RUN) --last 5 --output $(RUN)/averaged
	.venv/bin/python -m benchmarks.demo_report $(RUN)/averaged
	.venv/bin/flaxformer-min page $(RUN)/averaged --output $(RUN)/page.html

lint: .venv/installed-dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyrefly check --python-interpreter-path .venv/bin/python

check: lint
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.venv/compiled $(PYTEST) -q -m "not run"
	.venv/bin/python -m tools.house --short

test: lint
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.venv/compiled $(PYTEST) --durations=25
	.venv/bin/python -m tools.house --short

reliability: .venv/installed
	.venv/bin/python -m benchmarks.reliability

clean:
	rm -rf .venv

.venv/installed: $(PINS) | .venv
	@echo "installing the pinned packages into .venv ..."
	@$(PIP) -e '.[train]'
	@touch $@

.venv/installed-dev: $(PINS) | .venv
	@echo "installing the pinned packages into .venv ..."
	@$(PIP) -e '.[train,dev]'
	@touch $@ .venv/installed

.venv:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 on PATH: name one by PYTHON=..."; exit 2; }
	@$(PYTHON) -m venv .venv
