# make demo   prepare, train, sample, draw: everything, from a fresh clone
# make test   all tests
# Both make their own virtual environment first; it needs Python 3.11 or newer (make demo PYTHON=python3.12).

PYTHON ?= python3
# Two threads are at best 1.8 times as fast on matrices this small, and ten times slower where another program keeps a
# core busy, since they wait for each other. On an idle machine: make demo OMP_NUM_THREADS=2
export OMP_NUM_THREADS ?= 1
BIN := .venv/bin

.PHONY: demo test bench clean

# Going on where an interrupted demo stopped; one that never saved starts anew.
demo: .venv/ready
	$(BIN)/python prepare.py pydocs
	$(BIN)/python train.py config/demo.toml $$(test -f out/demo/ckpt.pt && echo --resume || echo --overwrite)
	$(BIN)/python -m experiments.loss_curves out/demo
	$(BIN)/python sample.py out/demo --mode=all --prompt="Return the " --max_new_tokens=200
	$(BIN)/python -m experiments.prefill_passes out/demo --feedback_passes=32 --results_dir=out/demo
	$(BIN)/python -m experiments.decoding_modes out/demo --results_dir=out/demo

test: .venv/ready
	$(BIN)/python -m pytest -q

bench: .venv/ready
	$(BIN)/python bench.py

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit("nanofbt needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@

clean:
	rm -rf .venv
