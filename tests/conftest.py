"""Fixtures that several test files share: a small corpus, prepared, and runs trained on it in seconds."""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: small matrices gain nothing from more

import pytest

from harness.configurator import build
from model import GPTConfig
from train import TrainConfig, train

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
QUICK = {"dataset": "tiny", "max_iters": 20, "batch_size": 4, "warmup_iters": 2, "eval_interval": 10, "eval_iters": 2,
         "eval_passes": 3, "log_interval": 1, "device": "cpu"}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """The data_dir of a prepared corpus named `tiny`: 20,000 characters of sums such as `12+30=42`."""
    import prepare

    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(1)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(3000)]
    (folder / "tiny.txt").write_text("".join(f"{a}+{b}={a + b}\n" for a, b in pairs)[:20_000])
    prepare.main([f"--input={folder}/tiny.txt", f"--data_dir={folder}"])
    return str(folder)


@pytest.fixture(scope="session")
def make_run(corpus, tmp_path_factory):
    """make_run(**settings) trains a tiny run in a new folder and returns the folder; settings of both configs."""
    def make(**settings) -> str:
        shape = SHAPE | {name: value for name, value in settings.items() if name in GPTConfig.__dataclass_fields__}
        rest = {name: value for name, value in settings.items() if name not in shape}
        out = str(tmp_path_factory.mktemp("runs") / "run")
        train(build(TrainConfig, QUICK | {"data_dir": corpus, "out_dir": out} | rest), build(GPTConfig, shape))
        return out
    return make


@pytest.fixture(scope="session")
def tiny_run(make_run) -> str:
    """A run with a gated fusion, three passes from the first step."""
    return make_run()


@pytest.fixture(scope="session")
def plain_run(make_run) -> str:
    """A run of a plain model."""
    return make_run(fusion="none", pass_mix=(1.0,))


@pytest.fixture
def small_preset(monkeypatch, tmp_path):
    """Makes each preset of the ablations a model of a few hundred weights, and the sweep `data` one of 1,000 tokens."""
    from experiments.ablations.sweeps import PRESETS

    file = tmp_path / "small.toml"
    file.write_text('block_size = 16\nn_layer = 1\nn_head = 2\nn_embd = 16\nmax_iters = 2\nbatch_size = 2\n'
                    'eval_interval = 2\neval_iters = 1\nlog_interval = 1\nwarmup_iters = 1\n')
    for name in PRESETS:
        monkeypatch.setitem(PRESETS, name, (str(file), 1_000))
