# make demo        prepare, train a plain and a full-bandwidth model, compare them: from a fresh clone
# make test        linter and all tests
# make test-fast   test_model.py alone: the method
# make bench       speed and memory, as ratios
# Each makes its own virtual environment first; it needs Python 3.11 or newer
# (make demo PYTHON=python3.12). Without make: see the README.

PYTHON ?= python3
# The matrices are small: two threads gain at most 1.8 times, and where another program keeps a core
# busy they wait for each other and lose tenfold. On an idle machine: make demo OMP_NUM_THREADS=2
export OMP_NUM_THREADS ?= 1
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test test-fast bench clean

# An interrupted training continues where it stopped; one that never saved starts anew. The data is
# kept, because another version of Python has another manual, and no run resumes on another text.
RESUME = $$(test -f $(1)/ckpt.pt && echo --resume || echo --overwrite)

demo: .venv/ready
	$(BIN)/python prepare.py pydocs --keep
	$(BIN)/python train.py config/demo.toml $(call RESUME,out/demo)
	$(BIN)/python train.py config/demo_plain.toml $(call RESUME,out/demo_plain)
	$(BIN)/python -m experiments.loss_curves out/demo_plain out/demo
	$(BIN)/python sample.py out/demo --mode=all --prompt="Return the " --max_new_tokens=200
	$(BIN)/python -m experiments.decoding_modes out/demo_plain out/demo --results_dir=out/demo

test: .venv/test-ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest -q --numprocesses=auto

test-fast: .venv/test-ready
	$(BIN)/python -m pytest -q test_model.py

bench: .venv/ready
	$(BIN)/python -m experiments.bench

.venv/ready: requirements.txt requirements-experiments.txt constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("nanofbt needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(INSTALL) --requirement requirements.txt --requirement requirements-experiments.txt
	touch $@

.venv/test-ready: .venv/ready requirements-pretrained.txt requirements-test.txt
	$(INSTALL) --requirement requirements-pretrained.txt --requirement requirements-test.txt
	touch $@

clean:
	rm -rf .venv
