# Every target sets up .venv by itself when it is missing or older than pyproject.toml or requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS ?= runs
# Two processes share the tests file by file, in their order: the files that take long come early.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
IS_ROOT := $(filter 0,$(shell id -u))
AS_ROOT := $(if $(IS_ROOT),,sudo)
# Compiled modules are kept, whatever the shell says: every rank and every command would compile the program anew.
export PYTHONDONTWRITEBYTECODE :=
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-all check scripts node ui notebooks lab parity audit survive fuzz pairs bench plan roofline peers recorded interop gpu-check gpu-wheels oldest table browser network proxies screenshots eightbit release schema demo-base demo-captioner lock clean

demo: .venv
	$(BIN)/python launch.py --headless presets/quickstart.yaml --runs $(RUNS)

test: .venv browser network
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PARALLEL)

test-all: eightbit browser network proxies
	$(BIN)/python -m pytest -m "not gpu" --timeout 1200 $(PARALLEL)

check: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	make scripts

# Types and lint of the page's scripts. Only this needs node; the page itself does not.
scripts:
	@if command -v npm > /dev/null; then $(MAKE) --no-print-directory tests/scripts/node_modules/.package-lock.json && \
	npm run --silent --prefix tests/scripts check; \
	else echo "Node is not installed, so the page's scripts were not checked: make node installs it."; fi
tests/scripts/node_modules/.package-lock.json: tests/scripts/package-lock.json
	npm ci --silent --no-audit --no-fund --prefix tests/scripts && touch $@

node:
	@command -v npm > /dev/null || { $(AS_ROOT) apt-get update -qq && \
	$(AS_ROOT) apt-get install -y -qq nodejs npm > /dev/null; }

ui: .venv
	$(BIN)/python launch.py

# Every notebook's .ipynb from its .py, without outputs.
notebooks: .venv
	$(BIN)/python -m tests.notebooks

# JupyterLab with the notebooks; notebooks/lab has its settings: no question about news, one file of each lesson, and
# none is rewritten when it is opened. It refuses root, whom containers run as.
lab: .venv
	JUPYTER_CONFIG_PATH=$(CURDIR)/notebooks/lab $(BIN)/python -m jupyterlab $(if $(IS_ROOT),--allow-root) notebooks

# The fast tests on the oldest torch that is supported, which brings gigabytes of CUDA; TESTS names some of them.
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet 'torch==2.11.*' -e '.[test]'
	.venv-oldest/bin/python -m pytest -m "not slow and not gpu" $(PARALLEL) $(TESTS)

parity: eightbit
	$(BIN)/python -m tests.distributed.matrix
	$(BIN)/python -m pytest tests/distributed/test_parity.py tests/distributed/test_resume.py --timeout 1200

# Losses, samples and adapters against references of our own; writes tests/benchmarks/AUDIT.md.
audit: .venv
	$(BIN)/python -m tests.audit

# A run killed 200 times; KILLS and SEED take others.
survive: .venv
	$(BIN)/python -m tests.survival $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))

bench: .venv browser
	$(BIN)/python -m tests.benchmarks.startup
	$(BIN)/python -m tests.benchmarks.memory
	$(BIN)/python -m tests.benchmarks.step_time
	$(BIN)/python -m tests.benchmarks.save_time
	$(BIN)/python -m tests.benchmarks.adapter_time
	$(BIN)/python -m tests.benchmarks.page
	$(BIN)/python -m tests.benchmarks.plan_time
	$(BIN)/python -m tests.benchmarks.text_time

# Whole programs in turns: ours, loops by hand and, where DIFFUSERS names it, diffusers' training example; an hour. ARGS
# more arguments.
peers: .venv
	$(BIN)/python -m tests.benchmarks.peers $(if $(DIFFUSERS),--diffusers $(DIFFUSERS)) $(ARGS)

# The plan against full traces of published models.
plan: .venv
	$(BIN)/python -m tests.benchmarks.plan

# Kernels, bytes, operations and time of a preset's step: PRESET=presets/NAME.yaml, ARGS more arguments. Without PRESET it
# writes tests/benchmarks/ROOFLINE.md.
roofline: .venv
	$(BIN)/python -m tests.benchmarks.roofline $(or $(PRESET),all) $(ARGS)

# What the plan knows of published models, after a change of their code; MODELS names some, MISSING=1 keeps what is there.
recorded: .venv
	$(BIN)/python -m trainer.plan tables $(if $(MISSING),--missing) $(MODELS)

# COMFYUI=path names a source tree of ComfyUI, whose loader is asked too.
interop: .venv
	$(BIN)/python -m tests.interop $(if $(COMFYUI),--comfyui $(COMFYUI))

# For a machine with a GPU: PARTS names some of its parts, ARGS more arguments. Goes on where it was stopped.
gpu-check:
	PYTHONPATH=. $(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.benchmarks.gpu_check \
		$(if $(PARTS),--parts $(PARTS)) $(ARGS)

# Wheels that a machine with torch 2.11 and Python 3.12 but without a network lacks; less than 60 MB.
gpu-wheels: .venv
	$(BIN)/python -m tests.benchmarks.gpu_wheels

table: .venv
	$(BIN)/python -m tests.exports

# Generated files, texts and requests for every door; MINUTES and SEED take others.
fuzz: .venv
	$(BIN)/python -m tests.fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

# Every pair of values of the fields that decide what a run does, in a real run; SHARE=1/10 tries a tenth, ARGS others.
pairs: eightbit
	$(BIN)/python -m tests.pairs $(if $(SHARE),--share $(SHARE)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# What the tests of the page open it with: Debian's Chromium. Elsewhere install one named chromium by hand.
browser:
	@command -v chromium > /dev/null || { $(AS_ROOT) apt-get update -qq && \
	$(AS_ROOT) apt-get install -y -qq chromium fonts-dejavu-core > /dev/null; }

# With what the tests of several nodes make machines of their own.
network:
	@command -v ip > /dev/null || { $(AS_ROOT) apt-get update -qq && \
	$(AS_ROOT) apt-get install -y -qq iproute2 > /dev/null; }

# What the slow tests put before the page, as app/web/proxy/ describes it.
proxies:
	@command -v nginx > /dev/null && command -v caddy > /dev/null && command -v openssl > /dev/null || { \
	$(AS_ROOT) apt-get update -qq && $(AS_ROOT) apt-get install -y -qq nginx-light caddy openssl > /dev/null; }

# The pictures of the page in the READMEs.
screenshots: .venv browser
	$(BIN)/python -m tests.app.web.screenshots

# 8-bit AdamW's package, bitsandbytes and Triton, which only the slow tests need. Of trl they read its chat templates; it
# is not imported, so that what it needs is not installed.
eightbit: .venv
	$(BIN)/python -m pip install --quiet --no-build-isolation -c requirements.lock -e '.[test,eightbit,reference]'
	$(BIN)/python -m pip install --quiet --no-deps 'trl==1.16.*'

# The model of `model.path: demo` again from nothing, a little over an hour on two cores.
# Needs the font of Debian's fonts-noto-color-emoji; FONT=file takes another place.
demo-base: .venv
	$(BIN)/python -m tests.demo_model build/demo-base $(if $(FONT),--font $(FONT))
	$(BIN)/python -m tests.benchmarks.demo_base build/demo-base/demo

# The model of `--caption --model demo` again from nothing, half an hour on two cores. Needs the same font.
demo-captioner: .venv
	$(BIN)/python -m tests.demo_model.captioner build/demo-captioner $(if $(FONT),--font $(FONT))
	$(BIN)/python -m tests.benchmarks.captioner build/demo-captioner $(if $(FONT),--font $(FONT))

# The source distribution and the wheel in dist/, which an empty environment has trained with.
release: .venv
	rm -rf build/release dist && mkdir -p build dist
	$(BIN)/python -m pytest tests/app/test_wheel.py --basetemp build/release --timeout 1200
	mv build/release/wheel0/*.tar.gz build/release/wheel0/*.whl dist && rm -r build/release

schema: .venv
	$(BIN)/python -m trainer.config.load
	$(BIN)/python -m trainer.models

# A file, so that make sees when pyproject.toml is newer.
.venv: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ShardStudio needs Python 3.11 or newer; make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c requirements.lock --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c requirements.lock -e '.[test]'
	@$(BIN)/python -m tests.lock --age
	touch $@

# The newest versions within the ranges of pyproject.toml become those that are installed, once they pass the tests.
lock: browser network
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --upgrade pip
	.venv-lock/bin/python -m pip install --quiet -e '.[test,eightbit,reference]'
	.venv-lock/bin/python -m pytest -m "not slow and not gpu" $(PARALLEL)
	.venv-lock/bin/python -m tests.lock

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
