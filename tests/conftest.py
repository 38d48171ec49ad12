"""Fixtures that several test files share: a small corpus, prepared, and runs trained on it."""

import os
import random
import shutil
from pathlib import Path

# Before torch is imported: small matrices gain nothing from more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from harness.configurator import build
from model import GPTConfig
from train import TrainConfig, train

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
QUICK = {
    "dataset": "tiny",
    "max_iters": 20,
    "batch_size": 4,
    "warmup_iters": 2,
    "eval_interval": 10,
    "eval_iters": 2,
    "eval_passes": 3,
    "log_interval": 1,
    "device": "cpu",
}


def configs(data_dir: str, out_dir: str, /, **settings) -> tuple[TrainConfig, GPTConfig]:
    """The two configs of a tiny run; settings of both, which may name another data_dir."""
    ours = QUICK | {"data_dir": str(data_dir), "out_dir": str(out_dir)}
    shape = dict(SHAPE)
    for name, value in settings.items():
        of_model = name in GPTConfig.__dataclass_fields__
        (shape if of_model else ours)[name] = value
    return build(TrainConfig, ours), build(GPTConfig, shape)


def fail_instead_of_skipping(report):
    """With CI=true nothing is skipped: what a test needs and does not find is a failure."""
    if os.environ.get("CI") == "true" and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"CI=true, and this was skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return fail_instead_of_skipping((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return fail_instead_of_skipping((yield))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """The data_dir of a prepared corpus named `tiny`: 20,000 characters of sums as `12+30=42`."""
    import prepare

    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(1)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(3000)]
    text = "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)
    (folder / "tiny.txt").write_text(text[:20_000])
    prepare.main([f"--input={folder}/tiny.txt", f"--data_dir={folder}"])
    return str(folder)


@pytest.fixture(scope="session")
def make_run(corpus, tmp_path_factory):
    """make_run(**settings) trains a tiny run in a new folder and returns the folder."""

    def make(**settings) -> str:
        out = str(tmp_path_factory.mktemp("runs") / "run")
        train(*configs(corpus, out, **settings))
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


@pytest.fixture(scope="session")
def learned(make_run) -> str:
    """A run long enough for its states and its modes to differ by more than noise."""
    return make_run(max_iters=120, learning_rate=5e-3, eval_interval=0)


@pytest.fixture(scope="session")
def data(corpus, tmp_path_factory) -> str:
    """A data_dir whose pydocs is the tiny corpus, 18,000 characters to train on."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(Path(corpus) / "tiny", folder / "pydocs")
    return str(folder)


SMALL_PRESET = """
block_size = 16
n_layer = 1
n_head = 2
n_embd = 16
max_iters = 2
batch_size = 2
eval_interval = 2
eval_iters = 1
log_interval = 1
warmup_iters = 1
"""


@pytest.fixture
def small_preset(monkeypatch, tmp_path):
    """Makes each preset of the ablations a model of a few hundred weights, and its text small."""
    from experiments.ablations.sweeps import PRESETS
    from experiments.data_efficiency import FEWEST

    file = tmp_path / "small.toml"
    file.write_text(SMALL_PRESET)
    for name in PRESETS:
        monkeypatch.setitem(PRESETS, name, str(file))
        monkeypatch.setitem(FEWEST, name, 200)


@pytest.fixture
def count_graphs(monkeypatch):
    """count_graphs(script) -> the graphs that its --compile makes from then on.

    The back end runs them as they are.
    """

    def count_graphs(script) -> list:
        graphs = []

        def back_end(graph, inputs):
            graphs.append(graph)
            return graph.forward

        def compile_blocks(blocks, device) -> bool:
            torch._dynamo.reset()
            for block in blocks:
                block.compile(backend=back_end)
            return True

        monkeypatch.setattr(script, "compile_blocks", compile_blocks)
        return graphs

    return count_graphs
