# make            set everything up and execute section 4.5.1, the result in build/
# make test       set everything up and run all tests
# make help       the rest

PYTHON ?= python3
# The release that the committed outputs were made with. Any of the range in pyproject.toml works;
# it is named here because pip alone would take the newest, and its largest build.
TORCH ?= torch==2.13.0

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready

.PHONY: run test install lab build exercises matrix bench lint clean help
.DEFAULT_GOAL := run

run: $(READY)  ## execute 4.5.1 and leave the notebook and a page in build/ (SECTION=… for another)
	$(RUN) -m companion run $(or $(SECTION),4.5.1)

test: $(READY)  ## ruff, unit tests, parity, cases, notebooks, TRL 1.16.0, exercises (STAGES=… for some)
	$(RUN) tools/check.py $(STAGES)

install: $(READY)  ## only set up .venv

lab: $(READY)  ## open the notebooks in JupyterLab
	$(RUN) -m jupyterlab notebooks

build: $(READY)  ## build notebooks/*.ipynb and RUNTIMES.md from notebooks/py
	$(RUN) tools/build.py

exercises: $(READY)  ## build the exercises from their solutions
	$(RUN) tools/exercises.py

matrix: $(READY)  ## parity with several releases of TRL, into RUNTIMES.md
	$(RUN) tools/matrix.py --write

bench: $(READY)  ## how fast GRPO and the losses run, what a step is made of
	$(RUN) tools/bench.py

lint: $(READY)  ## ruff alone
	$(RUN) tools/check.py ruff

clean:  ## remove what can be made anew, .venv included
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1  /p' Makefile | awk -F '  ' '{ printf "make %-10s %s\n", $$1, $$2 }'

# The stamp is the last step's, so an install that failed is tried again.
$(READY): pyproject.toml constraints.txt
	@rm -f $@
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
		"Python 3.11, 3.12 or 3.13 is needed, $(PYTHON) is %d.%d: make PYTHON=python3.11" % v)'
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install -c constraints.txt '$(TORCH)'
	$(RUN) -m pip install -c constraints.txt -e '.[test]'
	@touch $@
