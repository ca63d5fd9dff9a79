# Everything that is made or written stays below this folder: most of it in .venv.
# PYTHON=python3.12 sets up with that one; .ci/setup finds one if none is named.
PYTHON ?=
# TORCH=system uses the torch that PYTHON already has, such as the one of a GPU image.
TORCH ?=

run := .venv/bin/python
home := $(CURDIR)/.venv/home
export JUPYTER_CONFIG_DIR := $(home)/jupyter
export JUPYTER_DATA_DIR := $(home)/jupyter/data
export JUPYTER_RUNTIME_DIR := $(home)/jupyter/runtime
export IPYTHONDIR := $(home)/ipython
export MPLCONFIGDIR := $(home)/matplotlib
export XDG_CACHE_HOME := $(home)/cache
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JUPYTER_PLATFORM_DIRS := 1
# Kernels and settings of another installation would go before this one's.
unexport JUPYTER_PATH JUPYTER_CONFIG_PATH

.DEFAULT_GOAL := help
.PHONY: help setup lab demo test test-quick test-full test-notebooks test-browser lint format notebooks exercises book clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 17

setup: ## create .venv with the project and its pinned dependencies
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' sh .ci/setup

lab: setup ## open the lessons in JupyterLab
	@$(run) -m cpref lab

demo: setup ## train on a long document with several ranks, and compare with one
	@$(run) -m cpref demo

test: setup ## run all tests: units, real ranks, notebooks
	$(run) -m pytest -n 2 --dist loadfile --ignore=tests/browser
	@$(MAKE) --no-print-directory test-notebooks

test-quick: setup ## run the tests that take less than a minute
	$(run) -m pytest -q -m "not distributed and not slow"

test-full: setup ## run the full product of strategies, layouts, masks, dtypes and lengths
	$(run) -m pytest --full

test-notebooks: setup ## execute every notebook and compare with its stored outputs
	$(run) -m pytest -q -p no:cacheprovider --nbval --nbval-cell-timeout=120 \
		--nbval-sanitize-with tests/nbval_sanitize.cfg notebooks/*.ipynb

exercises: setup ## make exercises/ out of solutions/; CHECK=--check only compares
	@$(run) -c 'import nbgrader' 2>/dev/null || \
		$(run) -m pip install -q -c .venv/constraints.txt -e '.[exercises]'
	$(run) -m cpref.classroom.release $(CHECK)

book: setup ## render the lessons as a site with search, in build/book
	@$(run) -c 'import furo, jupyter_server_mathjax, myst_nb' 2>/dev/null || \
		$(run) -m pip install -q -c .venv/constraints.txt -e '.[book]'
	@rm -rf build/pages && mkdir -p build/pages && cp -R book/. notebooks build/pages
	$(run) -m sphinx -q -W --keep-going -b html build/pages build/book
	@echo "open build/book/index.html"

test-browser: setup ## open a lesson in JupyterLab in headless Chromium, run it, move a slider
	@$(run) -c 'import playwright' 2>/dev/null || \
		$(run) -m pip install -q -c .venv/constraints.txt -e '.[browser]'
	$(run) -m pytest -q -rs tests/browser

lint: setup ## check style and format
	$(run) -m ruff check .
	$(run) -m ruff format --check .

format: setup ## mend style and format
	$(run) -m ruff check --fix .
	$(run) -m ruff format .

notebooks: setup ## execute the notebooks and store them with their outputs
	$(run) -m cpref.classroom.store notebooks/*.ipynb

clean: ## remove what was made, .venv included
	rm -rf .venv out build *.egg-info .pytest_cache .ruff_cache .hypothesis
