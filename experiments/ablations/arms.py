"""From an arm, as data, to its runs, and from the runs to their numbers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from experiments.ablations.runs import do_runs, numbers_of, with_folder
from experiments.ablations.shapes import equal_depth, equal_hidden
from experiments.ablations.spec import Spec
from experiments.ablations.sweeps import PRESETS
from experiments.report import ROOT
from experiments.report import Settings as Shared
from harness.configurator import UserError, parse, require, setting
from harness.data import load_meta
from harness.machine import pick_device
from model import GPTConfig
from train import TrainConfig

N_PASSES = 100  # feedback passes that a run is measured with


@dataclass(frozen=True)
class TrainingSettings(Shared):
    """Of every experiment that trains: which preset, how many seeds, how many runs at a time."""

    preset: Literal["quick", "laptop", "gpu"] = setting(
        "laptop", "size and length: config/ablation_PRESET.toml; gpu: config/shakespeare_gpu.toml"
    )
    seeds: int = setting(3, "runs of each arm, with seeds seed, seed + 1, ...")
    jobs: int = setting(2, "runs at a time, which share the cores")
    max_iters: int = setting(0, "training steps of a run; 0: the preset's")
    out_dir: str = setting("out/ablations", "where the runs go", path=True)
    train: bool = setting(True, "false: report the runs that are finished, and start none")
    keep: bool = setting(False, "keep the checkpoints of finished runs")

    def __post_init__(self):
        super().__post_init__()
        require(self, "seeds", self.seeds >= 1, "at least 1")
        require(self, "jobs", self.jobs >= 1, "at least 1")
        require(self, "max_iters", self.max_iters >= 0, "positive, or 0 for the preset's")

    @property
    def all_seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)


def preset(settings: TrainingSettings) -> tuple[TrainConfig, GPTConfig]:
    """What the arms have in common, with the settings of the command line."""
    file = ROOT / "config" / PRESETS[settings.preset]
    config, shape, _ = parse([str(file)], TrainConfig, GPTConfig)
    config = replace(
        config,
        data_dir=settings.data_dir,
        device=settings.device,
        max_iters=settings.max_iters or config.max_iters,
    )
    return config, shape


def vocab_of(config: TrainConfig) -> int:
    """The number of symbols of a training's data, which the settings do not know."""
    return load_meta(Path(config.data_dir) / config.dataset)["vocab_size"]


def changed(config: TrainConfig, shape: GPTConfig, arm: dict) -> tuple[TrainConfig, GPTConfig]:
    """Both configs with an arm's changes, whose three special keys (see Sweep) are worked out."""
    changes = dict(arm)
    steps = changes.pop("steps", 1)
    layers = changes.pop("layers", shape.n_layer)
    equal_parameters = changes.pop("equal_parameters", False)
    config = replace(config, max_iters=round(config.max_iters * steps))
    if equal_parameters or layers != shape.n_layer:
        # The embedding's parameters count too, so shapes are fitted with the data's vocabulary.
        sized = replace(shape, vocab_size=vocab_of(config))
        depth = equal_depth(sized, layers)
        shape = replace(shape, **depth)
        if equal_parameters:
            shape = replace(shape, n_hidden=equal_hidden(replace(sized, **depth)))
    ours = {name: changes[name] for name in changes if name in TrainConfig.__dataclass_fields__}
    theirs = {name: changes[name] for name in changes if name not in ours}
    return replace(config, **ours), replace(shape, **theirs)


def spec_of(arm: dict, seed: int, settings: TrainingSettings) -> Spec:
    """One run of an arm, in its folder."""
    config, shape = preset(settings)
    base = Spec(config, shape, settings.n_windows, N_PASSES, keep=settings.keep)
    ours, our_shape = changed(replace(config, seed=seed), shape, arm)
    spec = replace(base, train=ours, model=our_shape)
    return with_folder(spec, base, Path(settings.out_dir) / settings.preset)


def gather(specs: dict, settings: TrainingSettings) -> dict:
    """Does the runs of {arm: {seed: spec}} -> {arm: {seed: its numbers}}.

    Seed by seed, so that an interrupted sweep has whole seeds. With --train=false nothing is
    trained, and what is not finished is left out: seeds, and arms without any.
    """
    if settings.train:
        pick_device(settings.device)
        in_order = []
        for seed in settings.all_seeds:
            in_order += [by_seed[seed] for by_seed in specs.values()]
        do_runs(in_order, settings.jobs)
    found = {}
    for arm, by_seed in specs.items():
        numbers = {seed: numbers_of(spec) for seed, spec in by_seed.items()}
        numbers = {seed: run for seed, run in numbers.items() if run is not None}
        if numbers:
            found[arm] = numbers
    return found


def need_finished(found: dict, settings: TrainingSettings, what: str) -> None:
    """UserError where no run is finished that could be reported."""
    if not found:
        raise UserError(
            f"{what}: no finished run in {settings.out_dir}/{settings.preset}; "
            "leave out --train=false to train them"
        )
