# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test test-all test-machines lint format bench architectures scoreboard scoreboard-peers clean

$(VENV)/.train: $(INPUTS)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e ".[train,quant]"
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) -c constraints.txt -e ".[train,quant,dev]"
	touch $@

demo: $(VENV)/.train
	$(VENV)/bin/nanstop demo s1-gemma3-dpo-fp16

test: $(VENV)/.dev
	$(PY) -m pytest -q -W error -n 2 --dist loadfile -m "not slow and not gpu"

test-all: $(VENV)/.dev
	$(PY) -m pytest -q -W error -n 2 --dist loadfile -m "not gpu"

# Of the last commit, in five clones: folders of any name, kernels of other CPUs, two threads, other seeds.
test-machines: $(VENV)/.dev
	$(PY) tools/test_machines.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests benchmarks
	$(VENV)/bin/ruff format --check src tests benchmarks
	$(VENV)/bin/pyright

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix src tests benchmarks
	$(VENV)/bin/ruff format src tests benchmarks

bench: $(VENV)/.dev
	$(PY) benchmarks/overhead.py

architectures: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/architectures.py

scoreboard: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/scoreboard.py

# The other tools, with the packages that two of them need, live beside nanstop's own environment.
.venv-peers/.done: $(INPUTS)
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt transformers trl peft accelerate datasets
	-.venv-peers/bin/pip install --quiet --disable-pip-version-check mindstudio-probe==26.2.0
	-.venv-peers/bin/pip install --quiet --disable-pip-version-check traincheck==0.2.0
	touch $@

scoreboard-peers: $(VENV)/.dev .venv-peers/.done
	OMP_NUM_THREADS=1 $(PY) benchmarks/scoreboard.py --peers

clean:
	rm -rf $(VENV) .venv-peers build dist .pytest_cache .ruff_cache
