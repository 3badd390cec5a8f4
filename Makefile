# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone with Python >= 3.10 alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORK := build/outside
SOURCES := pyproject.toml $(shell find gradlab capture analysis runtime datasets -name '*.py' -o -name '*.jinja' -o -name '*.css' -o -name '*.js')

.PHONY: demo test quality docs gpu gpu-speed gpu-loss campaign bench loggers elastic frameworks release install clean

demo: install
	$(BIN)/gradlab demo --out runs/demo-$$(date +%Y%m%d-%H%M%S)

# The tests run against the installed wheel: from outside the source root nothing here can be imported by accident.
# Three at a time on two cores, as some wait for other processes; in the order that tests/conftest.py gives them.
# PYTEST_ARGS="-k powersgd" runs some, "-m thorough" what is left out, "--hypothesis-profile explore" other examples.
OUTSIDE = mkdir -p $(WORK) && cd $(WORK) && $(CURDIR)/$(BIN)/python
PYTEST := -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider

test: install
	$(OUTSIDE) $(PYTEST) --numprocesses 3 --dist loadfile --no-loadscope-reorder $(CURDIR)/tests $(PYTEST_ARGS)

# Style, and types of the installed wheel.
quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(OUTSIDE) -m mypy --config-file $(CURDIR)/pyproject.toml -p gradlab

# The docs as a site, in build/docs, to be read without a network: a warning or a broken link is an error.
# BUILDER=linkcheck follows links to other hosts.
BUILDER ?= html
docs: build/play/play/report.html
	rm -rf build/docs
	$(OUTSIDE) -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -b $(BUILDER) -c $(CURDIR)/docs $(CURDIR) $(CURDIR)/build/docs
	$(if $(filter html,$(BUILDER)),$(OUTSIDE) $(CURDIR)/docs/sphinx/check_site.py $(CURDIR)/build/docs)

# The report that the site has to play with: digits, which scikit-learn brings, between four nodes.
build/play/play/report.html: $(VENV)/installed
	rm -rf build/play && mkdir -p build/play
	$(OUTSIDE) -m gradlab train digits --emulate 4 --batch-size 16 --steps 120 --capture $(CURDIR)/build/play/trace
	$(OUTSIDE) -m gradlab analyze $(CURDIR)/build/play/trace --out $(CURDIR)/build/play/play --quick --nodes 4,16 \
		--bandwidth 50mbit,1gbit --compute-seconds 20ms
	rm -rf build/play/trace

# Every check that needs a GPU, with PYTHON's own torch (2.6 or newer) and this checkout: nothing is installed. At most
# 8 minutes, one table; make says "Error 1" if a check failed, "Error 3" if there is no GPU (ARGS=--help).
gpu:
	$(PYTHON) tests/gpu $(ARGS)

# On one GPU, as `make gpu`: speeds beside a copy and plain DDP, in 8 minutes; GPT-2 small trained between 4 and 8
# emulated nodes, 8 minutes a call. Rows are in runs/gpu-*.jsonl, and in OUT; a call goes on where the last one ended.
gpu-speed gpu-loss:
	$(PYTHON) tests/gpu/checkout.py benchmarks $(subst -,_,$@) $(if $(OUT),--out $(OUT)) $(ARGS)

# Longer checks, each a table: NAME is one file of tests/campaigns, or several. CONTRIBUTING.md lists them.
campaign: install
	export PYTHONPATH="$(CURDIR)/tests:$$PYTHONPATH"; for name in $(NAME); do ($(OUTSIDE) $(CURDIR)/tests/campaigns/$$name.py $(ARGS)) || exit 1; done

# A benchmark by its name, such as NAME=codec_speed; RANKS starts it by torchrun. Each begins with how to call it.
bench: install
	mkdir -p runs
	$(if $(RANKS),OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS),$(BIN)/python) benchmarks $(NAME) $(ARGS)

# The sdist and the wheel made of it, in dist, and the wheel's demo in an empty environment.
release:
	rm -rf dist build/release
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --upgrade --constraint constraints.txt setuptools wheel
	mkdir -p dist && build/release/bin/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	build/release/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/gradlab-*.tar.gz
	build/release/bin/pip install --quiet dist/gradlab-*.whl
	cd build/release && bin/gradlab demo --out demo

install: $(VENV)/installed

# By hash where there are hashes for this Python and platform (`make HASHES= ...`: by version alone). torch comes last, by
# version: one version of it has other files on every index.
HASHES ?= $(wildcard hashes/$(shell $(PYTHON) hashes/record.py --tag).txt)

$(VENV)/dependencies: constraints.txt $(HASHES)
	$(PYTHON) -c 'import sys; sys.exit("gradlab needs Python 3.10 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 10) else 0'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(if $(HASHES),$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement $(HASHES))
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement constraints.txt
	touch $@

$(VENV)/installed: $(VENV)/dependencies $(SOURCES)
	rm -rf build/wheel build/lib build/bdist.*
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall build/wheel/gradlab-*.whl
	touch $@

# TensorBoard, W&B (offline) and Trackio: what each wrote, read back from its files. Their packages lie beside the
# environment, not in it, by hash where there are hashes (Python 3.11 or newer).
LOGGERS := build/loggers
LOGGERS_FILE = $(or $(wildcard hashes/loggers-$(shell $(PYTHON) hashes/record.py --tag).txt),constraints-loggers.txt)

loggers: install $(LOGGERS)/installed
	export PYTHONPATH="$(CURDIR)/$(LOGGERS)" && $(OUTSIDE) $(PYTEST) $(CURDIR)/tests/runtime/test_loggers.py

$(LOGGERS)/installed: $(VENV)/dependencies constraints-loggers.txt
	rm -rf $(LOGGERS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LOGGERS) --requirement $(LOGGERS_FILE) $(if $(filter hashes/%,$(LOGGERS_FILE)),--require-hashes)
	touch $@

# Workers that come and go, on torchft, and torchtitan's own trainer: their packages lie beside the environment, too.
elastic: install build/torchft/installed
	export PYTHONPATH="$(CURDIR)/build/torchft" && $(OUTSIDE) $(PYTEST) $(CURDIR)/tests/runtime/test_elastic.py $(PYTEST_ARGS)

frameworks: install build/torchtitan/installed
	export PYTHONPATH="$(CURDIR)/build/torchtitan" && $(OUTSIDE) $(PYTEST) $(CURDIR)/tests/runtime/test_torchtitan.py $(PYTEST_ARGS)

build/torchft/installed build/torchtitan/installed: build/%/installed: $(VENV)/dependencies constraints-%.txt
	rm -rf build/$*
	$(BIN)/python -m pip install --quiet --no-deps --target build/$* --requirement constraints-$*.txt
	touch $@

clean:
	rm -rf $(VENV) build dist runs *.egg-info
