"""probe, against the recurrence and the blocks spelled out here, and what a probe can know.

Of the model only `stack` without a cache, its blocks and `rope` are used to make an expectation.
"""

import importlib.util
import json

import numpy as np
import pytest
import torch
from by_hand import refused, saved_figures
from matplotlib.figure import Figure

import prepare
from corpora import tasks
from experiments import probe
from harness.configurator import UserError, build
from harness.tokenizer import CharTokenizer
from model import GPT, GPTConfig
from train import TrainConfig, train

B, T, L = 5, 12, 3
PREFILLS = ["standard", "last 1", "last 2", "last 4", "recurrent", "fused", "fused 3"]
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 180, "fusion": "gated"}


@pytest.fixture
def model() -> GPT:
    """A random one whose states differ clearly by what was fed."""
    torch.manual_seed(3)
    shape = {"block_size": T, "n_layer": L, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(vocab_size=len(tasks.SYMBOLS), **shape)).eval()
    torch.nn.init.normal_(model.embedding.weight)
    for norm in (model.input_norm, model.output_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model


@pytest.fixture
def idx() -> torch.Tensor:
    return torch.randint(len(tasks.SYMBOLS), (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def few(monkeypatch) -> None:
    """The probe sets of no more than 180 characters that the figure needs."""
    monkeypatch.setattr(tasks, "DISTRACTORS", (0, 8))
    monkeypatch.setattr(tasks, "REGISTERS", (8,))
    monkeypatch.setattr(tasks, "WRITES", (2,))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tasks.txt").write_text(tasks.text(n_examples=300))
    prepare.main([f"--input={folder}/tasks.txt", f"--data_dir={folder}"])
    return str(folder)


@pytest.fixture(scope="module")
def make(data, tmp_path_factory):
    """make(**settings) trains a tiny run on the tasks in a new folder and returns the folder."""

    def make(**settings) -> str:
        out = str(tmp_path_factory.mktemp("runs") / settings.pop("name", "run"))
        shape = {name: settings.pop(name, value) for name, value in SHAPE.items()}
        quick = {"dataset": "tasks", "data_dir": data, "out_dir": out, "max_iters": 2}
        quick |= {"batch_size": 1, "eval_iters": 0, "log_interval": 0, "device": "cpu"}
        train(build(TrainConfig, quick | settings), build(GPTConfig, shape))
        return out

    return make


@pytest.fixture(scope="module")
def tasks_run(make) -> str:
    return make(name="run_1", seed=1)


# Expectations


def normed(x: torch.Tensor, norm) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def fused(model, h, e) -> torch.Tensor:
    """Eq. (4) at one position: h, e (B, D)."""
    gate = normed(e, model.input_norm) @ model.fusion.W_G.weight.T
    return (h @ model.fusion.W_H.weight.T) / (1 + torch.exp(-gate))


@torch.no_grad()
def inputs(model, idx, n_recurrent) -> torch.Tensor:
    """u (B, T, D): plain, and at the last n_recurrent positions fused with the state before."""
    u = list(model.embedding.weight[idx].unbind(dim=1))
    for t in range(len(u) - n_recurrent, len(u)):
        h = model.stack(torch.stack(u[:t], dim=1))[:, -1]  # from all the inputs before it
        u[t] = fused(model, h, u[t])
    return torch.stack(u, dim=1)


@torch.no_grad()
def pass_inputs(model, idx, feedback_passes) -> torch.Tensor:
    """u (B, T, D) of the last of so many feedback passes."""
    e = model.embedding.weight[idx]
    u = e
    for _ in range(feedback_passes):
        h = model.stack(u)
        later = [fused(model, h[:, t - 1], e[:, t]) for t in range(1, e.size(1))]
        u = torch.stack([e[:, 0], *later], dim=1)
    return u


def inputs_by_prefill(model, idx) -> dict[str, torch.Tensor]:
    recurrent = (0, 1, 2, 4, idx.size(1) - 1)
    found = {name: inputs(model, idx, n) for name, n in zip(PREFILLS, recurrent, strict=False)}
    return found | {"fused": pass_inputs(model, idx, 1), "fused 3": pass_inputs(model, idx, 3)}


@torch.no_grad()
def stream_and_state(model, u) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L + 1, D) and (B, D) at the last position of inputs u, block by block."""
    x = normed(u, model.input_norm)
    depths = [x[:, -1]]
    for block in model.blocks:
        x = block(x, model.rope(0, u.size(1), u.device), None, 0)
        depths.append(x[:, -1])
    return torch.stack(depths, dim=1), normed(depths[-1], model.output_norm)


# Residual stream and prefills


def test_every_prefill_equals_the_naive_one(model, idx):
    found = probe.prefills(model, idx, feedback=True)
    assert list(found) == PREFILLS
    for name, u in inputs_by_prefill(model, idx).items():
        stream, state = stream_and_state(model, u)
        assert found[name][0].shape == (B, L + 1, 16) and found[name][1].shape == (B, 16)
        torch.testing.assert_close(found[name][0], stream, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[name][1], state, rtol=1e-4, atol=1e-5)
    # All prefills differ, because else the above shows little.
    states = torch.stack([state for _, state in found.values()], dim=1)  # (B, 7, D)
    assert torch.cdist(states, states).add(torch.eye(7)).min() > 1e-3


def test_the_full_recurrence_is_what_t_passes_give(model, idx):
    h = probe.prefills(model, idx, feedback=True)["recurrent"][1]
    with torch.no_grad():
        torch.testing.assert_close(h, model.passes(idx, T)[-1][:, -1], rtol=1e-4, atol=1e-5)
        assert (h - model.passes(idx, 4)[-1][:, -1]).abs().max() > 1e-3


def test_without_feedback_there_is_the_standard_prefill_alone(idx):
    shape = {"block_size": T, "n_layer": L, "n_head": 2, "n_embd": 16, "fusion": "none"}
    plain = GPT(GPTConfig(vocab_size=len(tasks.SYMBOLS), **shape)).eval()
    found = probe.prefills(plain, idx, feedback=False)
    assert list(found) == ["standard"]
    stream, state = stream_and_state(plain, plain.embedding.weight[idx])
    torch.testing.assert_close(found["standard"][0], stream)
    torch.testing.assert_close(found["standard"][1], state)


def test_hooks_are_gone_afterwards(model, idx):
    with pytest.raises(KeyError), probe.residual_stream(model) as depths:
        with torch.no_grad():
            model.stack(model.embed(idx))
        kept = [x.clone() for x in depths]
        assert all(x.shape == (B, 16) for x in kept)
        raise KeyError
    model.stack(model.embed(idx.flip(1)))
    assert all(torch.equal(x, y) for x, y in zip(kept, depths, strict=True))
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


# Probes


def folds_of(groups: np.ndarray) -> np.ndarray:
    """Group g in fold g % 4 alone, (N, 4)."""
    return groups[:, None] % 4 == np.arange(4)


def test_a_probe_reads_what_is_there_whatever_its_scale():
    draw = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    answers = np.tile([0, 1], 200)
    features = draw.normal(size=(400, 6))
    features[:, 2] += 4 * answers
    correct = probe.probe(features, answers, folds_of(groups))
    assert correct.shape == (400,) and 0.95 < correct.mean() < 1
    rescaled = features * [1e-4, 1, 1e3, 1, 1e5, 1] + 50
    np.testing.assert_array_equal(probe.probe(rescaled, answers, folds_of(groups)), correct)


def test_a_probe_of_random_answers_is_at_chance():
    draw = np.random.default_rng(0)
    in_fold = folds_of(np.repeat(np.arange(200), 10))
    answers = np.tile([0, 1], 1000)
    correct = probe.probe(draw.normal(size=(2000, 8)), answers, in_fold)
    assert abs(correct.mean() - 0.5) < 0.05  # 4.5 standard deviations
    correct = probe.probe(np.full((2000, 8), 0.3), answers, in_fold)  # all alike, as at depth 0
    assert correct.mean() == 0.5


def test_nothing_of_a_fold_is_learnt_for_its_test():
    """Features that name the group, and answers that only the group knows: worthless, or a leak."""
    draw = np.random.default_rng(0)
    groups = np.repeat(np.arange(80), 8)
    answers = draw.permutation(np.tile([0, 1], 40))[groups]
    names = np.eye(80)[groups]
    assert probe.probe(names, answers, folds_of(groups)).mean() < 0.65
    leaking = folds_of(draw.permutation(640))
    assert probe.probe(names, answers, leaking).mean() > 0.99


def test_examples_of_two_folds_serve_the_training_of_others_alone():
    """Two items an example, of which only the second one knows the answer."""
    in_fold = np.zeros((6, 3), dtype=bool)
    for row, folds in zip(in_fold, [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], strict=True):
        row[list(folds)] = True
    features = np.arange(6.0)[:, None]
    answers = np.array([0, 1, 1, 0, 1, 1])
    fitted = []

    class Spy:
        def fit(self, features, answers):
            fitted.append(features[:, 0].tolist())

        def predict(self, features):
            return np.ones(len(features))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sklearn.pipeline.make_pipeline", lambda *parts: Spy())
        correct = probe.probe(features, answers, in_fold)
    assert fitted == [[1, 2, 4], [0, 2, 5], [0, 1, 3]]  # those that hold nothing of the fold
    assert correct.tolist() == [False, True, True]  # the first three, each tested once


def test_completion_folds_share_no_numeral():
    for seed in (0, 1):
        examples = tasks.completion(0, seed)
        in_fold = probe.fold_table(examples)
        held = [frozenset((example.prompt[5:7], example.prompt[13:15])) for example in examples]
        assert held[0] <= set(tasks.PROBED)
        for fold in range(4):
            tested = in_fold[:, fold] & (in_fold.sum(1) == 1)
            asked = set().union(*(held[i] for i in np.flatnonzero(tested)))
            learnt = set().union(*(held[i] for i in np.flatnonzero(~in_fold[:, fold])))
            assert len(asked) == 5 and len(learnt) == 15 and not asked & learnt
            assert tested.sum() == 200  # ten pairs of numerals


def test_accuracy_and_its_error_over_groups_by_hand():
    # Group means 1, 0.5, 0: mean 0.5, deviation 0.5, error 0.5 / sqrt(3).
    correct = np.array([1, 1, 0, 1, 0, 0], dtype=bool)
    found = probe.accuracy(correct, np.array([2, 2, 7, 7, 9, 9]))
    assert found == {"accuracy": 0.5, "error": pytest.approx(0.5 / 3**0.5)}


# Series


def checkpoint_of(seed: int = 1, fusion: str = "gated", **settings) -> dict:
    train_config = {"seed": seed, "out_dir": f"out/{seed}", "max_iters": 9, "init_from": ""}
    return {"model_config": {"fusion": fusion}, "train_config": train_config | settings}


def test_trainings_that_differ_in_their_seed_are_one_series(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ["out/t_1", "out/p_1", "out/t_2", "out/p_2", "out/long"]
    for path in paths:
        (tmp_path / path).mkdir(parents=True)
    checkpoints = [
        checkpoint_of(1, eval_passes=2, recompute=False, device="cuda"),
        checkpoint_of(1, "none"),
        checkpoint_of(2, eval_passes=3, recompute=True, device="cpu"),
        checkpoint_of(2, "none"),
        checkpoint_of(2, "none", max_iters=27),
    ]
    assert probe.collect_series(paths, checkpoints) == {
        "t": ["out/t_1", "out/t_2"],
        "p": ["out/p_1", "out/p_2"],
        "long": ["out/long"],
    }
    with pytest.raises(UserError, match="t_1 and t_2 .* the same seed=1"):
        probe.collect_series(paths[::2], [checkpoint_of(1), checkpoint_of(1), checkpoint_of(3)])


def test_mean_and_interval_over_trainings_by_hand():
    found = probe.over_trainings([{"accuracy": x, "error": 0.1} for x in (0.5, 0.6, 0.7)])
    # Student's t of 2 degrees of freedom at 97.5% is 4.30265.
    assert found == {
        "accuracy": pytest.approx(0.6),
        "interval": pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-5),
    }
    assert probe.over_trainings([{"accuracy": 0.5, "error": 0.1}]) == {
        "accuracy": 0.5,
        "error": 0.1,
    }


def test_all_bars_are_half_of_a_95_percent_interval():
    panel = Figure().subplots()
    points = [{"accuracy": 0.5, "interval": 0.2}, {"accuracy": 0.5, "error": 0.1}]
    probe.errorbar(panel, [0, 1], points, {})
    (bars,) = panel.containers[0].lines[2]
    heights = [ends[1, 1] - ends[0, 1] for ends in bars.get_segments()]
    assert heights == pytest.approx([0.4, 2 * 1.96 * 0.1])


# The experiment


def test_the_models_own_answers_are_counted(tasks_run, data, few):
    loaded = probe.report.start([tasks_run], probe.Settings(data_dir=data))[1][0]
    model, checkpoint, _ = loaded
    symbols = checkpoint["tokenizer"]["symbols"]
    # An untrained model's answers would all be the same.
    model.requires_grad_(False).embedding.weight.mul_(20)
    examples = tasks.probe_sets(n_groups=4)["completion", 8]
    found = probe.probe_set_numbers(model, CharTokenizer(symbols), examples, feedback=True)
    assert (found["examples"], found["groups"], found["length"]) == (80, 4, 62)
    assert found["tested"] == 80 and list(found["prefills"]) == PREFILLS
    rows = torch.tensor([[symbols.index(c) for c in example.prompt] for example in examples])
    right = dict.fromkeys(PREFILLS, 0)
    unrestricted = dict.fromkeys(PREFILLS, 0)
    for name, u in inputs_by_prefill(model, rows).items():
        logits = stream_and_state(model, u)[1] @ model.embedding.weight.T
        for row, example in zip(logits, examples, strict=True):
            more = row[symbols.index("m")]
            done = row[symbols.index("d")]
            right[name] += ("d" if done > more else "m") == example.answer
            unrestricted[name] += symbols[int(row.argmax())] == example.answer
    for name, by in found["prefills"].items():
        assert len(by["depths"]) == 2
        assert by["answer"]["accuracy"] * 80 == pytest.approx(right[name])
        assert by["unrestricted"]["accuracy"] * 80 == pytest.approx(unrestricted[name])
    assert len(set(right.values())) > 1 and right != unrestricted


def curves_of(panel) -> dict[str, list[float]]:
    """What a panel's points show, by place in the legend's order."""
    return [list(container.lines[0].get_ydata()) for container in panel.containers]


def check_table(out: str, sets: dict) -> None:
    rows = []
    for line in out.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert len(rows) == 2 + 12
    row = next(row for row in rows if row[0] == "run" and row[2:4] == ["memory", "8"])
    by = sets["memory"]["8"]["prefills"]
    wanted = [by[name]["depths"][0] for name in PREFILLS[:5]]
    wanted.append(by["standard"]["depths"][1])
    for name in ("standard", "last 4", "recurrent", "fused", "fused 3"):
        wanted.append(by[name]["answer"])
    cells = [f"{one['accuracy']:.3f} ± {one['interval']:.3f}" for one in wanted]
    assert row[1] == "2" and row[4:] == cells


def check_figure(figure: Figure, sets: dict, plain_sets: dict) -> None:
    panels = {panel.get_label(): panel for panel in figure.subfigs[0].axes}
    by = sets["memory"]["8"]["prefills"]
    expected = [[one["accuracy"] for one in by[name]["depths"]] for name in PREFILLS]
    plain = plain_sets["memory"]["8"]["prefills"]["standard"]["depths"]
    expected.append([one["accuracy"] for one in plain])
    assert curves_of(panels["memory by depth"]) == expected
    expected = []
    for of, name in [*((sets, name) for name in PREFILLS), (plain_sets, "standard")]:
        numbers = [numbers for swept in of.values() for numbers in swept.values()]
        expected.append([one["prefills"][name]["answer"]["accuracy"] for one in numbers])
    assert curves_of(panels["answers"]) == expected
    for container in panels["answers"].containers:
        assert container.lines[0].get_linestyle() == "None"  # probe sets are categories
    found = curves_of(panels["memory"])[1]
    points = [sets["memory"][n]["prefills"]["last 1"]["depths"][0] for n in ("0", "8")]
    assert found == [one["accuracy"] for one in points]
    labels = [text.get_text() for text in panels["legend"].get_legend().get_texts()]
    assert labels == [*PREFILLS, "plain, standard"]


@pytest.mark.usefixtures("few")
def test_the_experiment_from_end_to_end(tasks_run, make, tmp_path, capsys, monkeypatch):
    figures = saved_figures(monkeypatch)
    second = make(name="run_2", seed=2)
    plain = make(name="plain", fusion="none", pass_mix=(1.0,))
    data_dir = torch.load(f"{plain}/ckpt.pt", weights_only=True)["train_config"]["data_dir"]
    words = [tasks_run, second, plain, f"--data_dir={data_dir}", "--limit=4"]
    words += [f"--results_dir={tmp_path}/results", f"--cache_dir={tmp_path}/kept"]
    assert probe.main(words) == 0
    assert (tmp_path / "results/probe.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "results/probe.json").read_text())
    assert result["settings"]["limit"] == 4
    series = result["series"]
    assert list(series) == ["run", "plain"] and series["run"]["checkpoints"] == words[:2]
    for name, prefills in (("run", PREFILLS), ("plain", PREFILLS[:1])):
        sets = series[name]["sets"]
        counts = {}
        for task, swept in sets.items():
            for n, numbers in swept.items():
                counts[task, n] = numbers["examples"]
                assert list(numbers["prefills"]) == prefills
                assert numbers["prefills"]["standard"]["depths"][0]["accuracy"] == 0.5
        assert list(counts.values()) == [80, 80, 40, 40, 64, 64]
        assert sets["registers"]["8"] == sets["writes"]["2"]
    numbers = series["run"]["sets"]["completion"]["0"]
    by = numbers["prefills"]
    assert by["last 1"]["depths"][0] == by["fused"]["depths"][0] != by["standard"]["depths"][0]
    each = [one["prefills"]["last 1"]["depths"][0]["accuracy"] for one in numbers["trainings"]]
    assert len(each) == 2 and by["last 1"]["depths"][0]["accuracy"] == pytest.approx(np.mean(each))

    out = capsys.readouterr().out
    assert "plain, standard prefill only: " in out and "run, standard" not in out
    check_table(out, series["run"]["sets"])
    check_figure(figures[0], series["run"]["sets"], series["plain"]["sets"])

    # What was measured is kept, by weights and settings.
    monkeypatch.setattr(probe, "probe_set_numbers", lambda *args: 1 / 0)
    monkeypatch.setattr(probe, "plot", lambda *args: None)  # takes a second
    assert probe.main(words) == 0
    assert json.loads((tmp_path / "results/probe.json").read_text())["series"] == series
    with pytest.raises(ZeroDivisionError):
        probe.main([*words, "--seed=1"])
    with pytest.raises(ZeroDivisionError):
        probe.main([make(name="other", seed=3), *words[3:]])


@pytest.mark.usefixtures("few")
def test_mistakes_are_refused_in_one_line(tasks_run, make, data, tiny_run, corpus, tmp_path):
    place = (f"--data_dir={data}", f"--results_dir={tmp_path}/no", f"--cache_dir={tmp_path}/kept")
    assert "checkpoint" in refused(probe, *place)
    assert "--limit=3 must be at least 4" in refused(probe, tasks_run, *place, "--limit=3")
    message = refused(probe, tiny_run, f"--data_dir={corpus}")
    assert tiny_run in message and "lacks" in message and "config/tasks.toml" in message
    message = refused(probe, make(name="short", block_size=100, max_iters=1), *place)
    assert "block_size=100" in message and "180" in message and "--block_size=180" in message
    assert not (tmp_path / "no").exists()


def test_the_probes_need_scikit_learn(tasks_run, data, monkeypatch):
    found = importlib.util.find_spec

    def lacks(name):
        return None if name == "sklearn" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", lacks)
    assert "pip install scikit-learn" in refused(probe, tasks_run, f"--data_dir={data}")
