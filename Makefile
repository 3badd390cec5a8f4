# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone with Python >= 3.10 alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORK := build/outside
SOURCES := pyproject.toml $(shell find gradlab capture analysis runtime datasets -name '*.py' -o -name '*.jinja' -o -name '*.css' -o -name '*.js')

.PHONY: demo test thorough explore gpu quality typecheck capture-cost speed rates netbench-table compare compare-text figures-check lgc matrix faults kills outages interrupts resume frameworks nodes mutants convergence fuzz played reports first-hour loggers hashes install clean corpus docs docs-links

demo: install
	$(BIN)/gradlab demo --out runs/demo-$$(date +%Y%m%d-%H%M%S)

# The tests run against the installed wheel: from outside the source root nothing here can be imported by accident.
# Three at a time on two cores, as some wait for other processes; in the order that tests/conftest.py gives them.
PYTEST := $(CURDIR)/$(BIN)/python -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: install
	mkdir -p $(WORK) && cd $(WORK) && $(PYTEST) $(CURDIR)/tests $(PYTEST_ARGS)

# What `make test` leaves out, as another target holds it too, or it takes long for what it adds.
thorough: install
	mkdir -p $(WORK) && cd $(WORK) && $(PYTEST) -m thorough $(CURDIR)/tests $(PYTEST_ARGS)

# The tests with other random examples each time, and three times as many.
explore: install
	mkdir -p $(WORK) && cd $(WORK) && $(PYTEST) --hypothesis-profile explore $(CURDIR)/tests $(PYTEST_ARGS)

# Every check that needs a GPU, with PYTHON's own torch (2.6 or newer) and this checkout: nothing is installed. At most
# 8 minutes, one table; make says "Error 1" if a check failed, "Error 3" if there is no GPU (ARGS=--help).
gpu:
	$(PYTHON) tests/gpu $(ARGS)

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: install
	mkdir -p $(WORK) && cd $(WORK) && $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml -p gradlab

# What recording costs: two models, with a core to spare and without (on two cores), and the disk. A run adds its rows.
capture-cost: install
	mkdir -p runs
	export OMP_NUM_THREADS=1; for ranks in 1 2; do for model in resnet18 transformer; do \
	  $(BIN)/torchrun --standalone --nproc-per-node $$ranks benchmarks/capture_cost.py --model $$model --rows runs/capture-cost.jsonl $(ARGS) || exit 1; \
	done; done; $(BIN)/torchrun --standalone --nproc-per-node 1 benchmarks/capture_cost.py --disk --rows runs/capture-cost.jsonl --rounds 3
	$(BIN)/python benchmarks/capture_cost.py --rows runs/capture-cost.jsonl --table

# Encoding and decoding of every codec beside a copy, of one tensor and of real models' layers; steps of many small layers;
# replays of many ranks (an hour; ROWS=a folder for what is measured).
ROWS ?= runs/speed
speed: install
	mkdir -p $(ROWS)
	$(BIN)/python benchmarks/codec_speed.py --rows $(ROWS)/codec-speed.jsonl --layers "one tensor" ResNet-18 "GPT-2 small" $(ARGS)
	$(BIN)/python benchmarks/small_layers.py --rows $(ROWS)/small-layers.jsonl
	$(BIN)/python benchmarks/lockstep_ranks.py --rows $(ROWS)/lockstep-ranks.jsonl

# Errors over bits of every codec on recordings, beside the least there can be
# (RECORDINGS="TITLE=FOLDER ...", 10 minutes each).
RECORDINGS ?= ResNet-8=runs/compare/trace
rates: install
	mkdir -p $(ROWS)
	$(BIN)/python benchmarks/rate_distortion.py --rows $(ROWS)/rate-distortion.jsonl --recordings $(RECORDINGS)

# Step over computing alone on limited links, beside PyTorch's hooks (hours, and root; NETBENCH=the folder of its run.sh).
NETBENCH ?= ../shared/tools/netbench
netbench-table: install
	mkdir -p $(ROWS)
	$(BIN)/python benchmarks/link_table.py --netbench $(NETBENCH) --rows $(ROWS)/link-table.jsonl $(ARGS)

# Every figure of the docs' measured tables against the rows of benchmarks/results.
figures-check: install
	$(BIN)/python benchmarks/figures_check.py $(ARGS)

# All methods replayed and trained (hours; DATA=cifar10.npz).
compare: install
	mkdir -p runs/compare
	test -e runs/compare/trace || $(BIN)/python benchmarks/methods.py --data $(DATA) --record runs/compare/trace
	$(BIN)/python benchmarks/methods.py --trace runs/compare/trace --replay runs/compare/replay.jsonl
	$(BIN)/python benchmarks/methods.py --data $(DATA) --train runs/compare/training.jsonl
	$(BIN)/python benchmarks/methods.py --trace runs/compare/trace --replay runs/compare/replay.jsonl --train runs/compare/training.jsonl --table --figure runs/compare/errors.svg

# nanoGPT's Shakespeare under all codecs and methods, against dense (days; DATA=tinyshakespeare.txt). Rows are kept, and
# what is there is not done again (ARGS="--seeds 2 --rows more.jsonl").
compare-text: install
	$(BIN)/python benchmarks/text_chars.py --data $(DATA) --work runs/compare-text $(ARGS)
	$(BIN)/python benchmarks/text_chars.py --table $(ARGS)

# Three small recordings, and what became of methods that were trained there, in one file to give away (20 minutes on two
# cores, with transformers; DATA=a folder with cifar10.npz, tinyshakespeare.txt and wikitext2/). Runs are kept.
corpus: install
	$(BIN)/python benchmarks/corpus.py --data $(DATA) --work runs/corpus $(ARGS)

# LGC beside what it must beat, trained on both tasks (an hour or two; DATA=cifar10.npz, STREETS=camvid.npz).
lgc: install
	mkdir -p runs/lgc
	$(BIN)/python benchmarks/lgc.py cifar10 --data $(DATA) --train runs/lgc/rows.jsonl --table
	$(BIN)/python benchmarks/lgc.py camvid --data $(STREETS) --train runs/lgc/rows.jsonl --table
	$(BIN)/python benchmarks/lgc_figures.py --data $(DATA) --rows runs/lgc/figures.jsonl --traces runs/lgc --information runs/lgc/information.svg --sparsification runs/lgc/sparsification.svg --reconstruction runs/lgc/reconstruction.svg
	$(BIN)/python benchmarks/lgc_bytes.py table6

# Longer campaigns, each a table on standard output: codec x DDP option x ranks; ranks killed, stopped and failing, kills
# while recording, repairing, training and saving, a network that goes away, Ctrl-C in every command (faults: all four);
# every codec x wrapper resumed in new processes; GPT-2 and BERT in every framework; several ranks to a node under DDP
# and FSDP2; faults of one line, one at a time,
# and the test that notices each; every codec x kind of residual trained in lockstep: it converges, is refused, or warns;
# damaged and altered files of every format (ARGS="--formats trace --count 20000"); public reports of other tools, tried
# here; a session with a report in a browser.
matrix kills outages interrupts resume frameworks nodes mutants convergence fuzz played reports: install
	mkdir -p $(WORK) && cd $(WORK) && PYTHONPATH="$(CURDIR)/tests:$$PYTHONPATH" $(CURDIR)/$(BIN)/python $(CURDIR)/tests/campaigns/$@.py $(ARGS)

faults: install
	mkdir -p $(WORK) && cd $(WORK) && for part in faults kills outages interrupts; do \
	PYTHONPATH="$(CURDIR)/tests:$$PYTHONPATH" $(CURDIR)/$(BIN)/python $(CURDIR)/tests/campaigns/$$part.py || exit 1; done

# The first hour of a new user: a GPT-2 and the Trainer, every command once, with its time (TEXT=any file of 100 kB).
first-hour: install
	mkdir -p $(WORK) && cd $(WORK) && PYTHONPATH="$(CURDIR)/tests:$$PYTHONPATH" $(CURDIR)/$(BIN)/python $(CURDIR)/tests/campaigns/first_hour.py $(abspath $(TEXT)) $(ARGS)

# The docs as a site, in build/docs, to be read without a network: a warning or a broken link is an error.
SPHINX := $(CURDIR)/$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -c $(CURDIR)/docs
docs: install
	mkdir -p $(WORK) && rm -rf build/docs && cd $(WORK) && $(SPHINX) $(CURDIR) $(CURDIR)/build/docs
	cd $(WORK) && $(CURDIR)/$(BIN)/python $(CURDIR)/docs/sphinx/check_site.py $(CURDIR)/build/docs
	@echo "open build/docs/index.html"

# Links to other hosts, which needs a network.
docs-links: install
	mkdir -p $(WORK) && cd $(WORK) && $(SPHINX) -b linkcheck $(CURDIR) $(CURDIR)/build/docs-links

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
	mkdir -p $(WORK) && cd $(WORK) && PYTHONPATH="$(CURDIR)/$(LOGGERS)" $(CURDIR)/$(BIN)/python -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider $(CURDIR)/tests/runtime/test_loggers.py

$(LOGGERS)/installed: $(VENV)/dependencies constraints-loggers.txt
	rm -rf $(LOGGERS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LOGGERS) --requirement $(LOGGERS_FILE) $(if $(filter hashes/%,$(LOGGERS_FILE)),--require-hashes)
	touch $@

hashes: install
	$(BIN)/python hashes/record.py

clean:
	rm -rf $(VENV) build runs *.egg-info
