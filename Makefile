# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
# Hundreds of processes that the tests start import what the first of them has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-lowest smoke-lowest test-newest test-llamafactory test-machines lint format bench architectures foreign forms healthy silent scoreboard scoreboard-peers metamorphic package site test-site changelog clean

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

# Three workers for two cores: tests wait for processes that they have started.
test: $(VENV)/.dev
	$(PY) -m pytest -q -W error -n 3 --dist loadfile -m "not slow and not gpu"

test-all: $(VENV)/.dev
	$(PY) -m pytest -q -W error -n 2 --dist loadfile -m "not gpu"

# Of the last commit, in five clones: folders of any name, kernels of other CPUs, two threads, other seeds.
test-machines: $(VENV)/.dev
	$(PY) tools/test_machines.py

# What pyproject.toml promises has an environment of its own at either end. `make smoke-lowest` has the torch of
# constraints.txt: torch 2.6 for Linux comes with 3 GB of CUDA libraries, too much for each change.
UNREACHABLE = { echo "$@: the packages could not be installed; is the package registry reachable?" >&2; exit 1; }
QUIETLY := --quiet --disable-pip-version-check
SMOKE := tests/hosts/trainer/test_watch.py tests/test_bookkeeping.py tests/test_api.py

.venv-lowest/.done: pyproject.toml constraints-lowest.txt
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install $(QUIETLY) -r constraints-lowest.txt || $(UNREACHABLE)
	.venv-lowest/bin/pip install $(QUIETLY) -c constraints-lowest.txt -e ".[train,quant]" || $(UNREACHABLE)
	touch $@

test-lowest: .venv-lowest/.done
	.venv-lowest/bin/nanstop env
	.venv-lowest/bin/python -m pytest -q -W error -n 2 --dist loadfile -m "not slow and not gpu"

.venv-lowest/.llamafactory: .venv-lowest/.done
	.venv-lowest/bin/pip install $(QUIETLY) -c constraints-lowest.txt \
		llamafactory==0.9.5 torchaudio==2.6.0 torchvision==0.21.0 || $(UNREACHABLE)
	touch $@

test-llamafactory: .venv-lowest/.llamafactory
	.venv-lowest/bin/python -m pytest -q -W error tests/e2e/test_llamafactory.py

.venv-smoke/.done: $(INPUTS) constraints-lowest.txt
	test -x .venv-smoke/bin/python || $(PYTHON) -m venv .venv-smoke
	.venv-smoke/bin/pip install $(QUIETLY) "$$(grep '^torch==' constraints.txt)" || $(UNREACHABLE)
	grep -v '^torch==\|^bitsandbytes==' constraints-lowest.txt > .venv-smoke/lowest.txt
	.venv-smoke/bin/pip install $(QUIETLY) -r .venv-smoke/lowest.txt || $(UNREACHABLE)
	.venv-smoke/bin/pip install $(QUIETLY) --no-deps -e . || $(UNREACHABLE)
	touch $@

smoke-lowest: .venv-smoke/.done
	.venv-smoke/bin/nanstop env
	.venv-smoke/bin/python -m pytest -q -W error -n 2 -m "not slow and not gpu" $(SMOKE)

test-newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install $(QUIETLY) --upgrade --upgrade-strategy eager -e ".[train,quant,dev]" || $(UNREACHABLE)
	.venv-newest/bin/nanstop env
	.venv-newest/bin/python -m pytest -q -W error -n 2 --dist loadfile -m "not slow and not gpu"

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

foreign: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/foreign.py

forms: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/forms.py

healthy: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/healthy_programs.py

silent: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/silent.py --again

scoreboard: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/scoreboard.py

metamorphic: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) benchmarks/metamorphic.py

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

# Wheel and sdist, checked, and the wheel used in an environment that has nothing else of the project.
package: $(VENV)/.dev
	rm -rf dist build/package
	$(PY) -m build --outdir dist
	$(VENV)/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/package
	build/package/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	build/package/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && package/bin/python ../tools/try_package.py

# The documentation site in build/site; `.venv-docs/bin/mkdocs serve` shows it while it is written. Needs no torch.
.venv-docs/.done: docs/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install $(QUIETLY) -r docs/requirements.txt || $(UNREACHABLE)
	touch $@

site: .venv-docs/.done
	.venv-docs/bin/mkdocs build --strict

# Every block of the site's pages, every script of examples/, and the way from symptoms to cures on the built site.
test-site: $(VENV)/.dev site
	$(PY) -m pytest -q -W error -n 2 tests/docs

changelog: $(VENV)/.dev
	$(VENV)/bin/towncrier build --draft --version next

clean:
	rm -rf $(VENV) .venv-docs .venv-peers .venv-lowest .venv-smoke .venv-newest build dist .pytest_cache .ruff_cache
