"""experiments.probe, against the recurrence and the blocks spelled out here, and what a probe can and cannot know.

Of the model only `stack` without a cache, its blocks and `rope` are used to make an expectation.
"""

import importlib.util
import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import prepare
from corpora import tasks
from harness.configurator import UserError, build
from experiments import probe
from model import GPT, GPTConfig
from harness.tokenizer import CharTokenizer
from train import TrainConfig, train

B, T, L = 5, 12, 3
PREFILLS = ["standard", "last 1", "last 2", "last 4", "recurrent", "fused", "fused 3"]
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 180}


@pytest.fixture
def model() -> GPT:
    """A random one whose states differ clearly by what was fed."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=len(tasks.SYMBOLS), block_size=T, n_layer=L, n_head=2, n_embd=16)).eval()
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
        shape = {name: settings.pop(name, value) for name, value in (SHAPE | {"fusion": "gated"}).items()}
        quick = {"dataset": "tasks", "data_dir": data, "out_dir": out, "max_iters": 3, "batch_size": 1, "eval_iters": 0,
                 "log_interval": 0, "device": "cpu"}
        train(build(TrainConfig, quick | settings), build(GPTConfig, shape))
        return out
    return make


@pytest.fixture(scope="module")
def tasks_run(make) -> str:
    return make()


def refused(*words) -> str:
    with pytest.raises(UserError) as error:
        probe.main(list(words))
    assert "\n" not in str(error.value)
    return str(error.value)


# Expectations


def fused(model, h, e) -> torch.Tensor:
    """Eq. (4) at one position: h, e (B, D)."""
    e = e / (e.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.input_norm.weight
    return (h @ model.fusion.W_H.weight.T) / (1 + torch.exp(-(e @ model.fusion.W_G.weight.T)))


@torch.no_grad()
def inputs(model, idx, n_recurrent) -> torch.Tensor:
    """u (B, T, D): plain embeddings, and at the last n_recurrent positions their fusion with the state before."""
    u = list(model.embedding.weight[idx].unbind(dim=1))
    for t in range(len(u) - n_recurrent, len(u)):
        h = model.stack(torch.stack(u[:t], dim=1))[:, -1]  # recomputed from all the inputs before it
        u[t] = fused(model, h, u[t])
    return torch.stack(u, dim=1)


@torch.no_grad()
def pass_inputs(model, idx, n_passes) -> torch.Tensor:
    """u (B, T, D) of the pass after n_passes - 1 others that follow the plain one."""
    e = model.embedding.weight[idx]
    u = e
    for _ in range(n_passes):
        h = model.stack(u)
        u = torch.stack([e[:, 0], *(fused(model, h[:, t - 1], e[:, t]) for t in range(1, e.size(1)))], dim=1)
    return u


@torch.no_grad()
def stream_and_state(model, u) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L + 1, D) and (B, D) at the last position of inputs u, block by block."""
    x = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.input_norm.weight
    depths = [x[:, -1]]
    for layer, block in enumerate(model.blocks):
        x = block(x, model.rope(0, u.size(1), u.device), layer, None)
        depths.append(x[:, -1])
    x = depths[-1]
    return torch.stack(depths, dim=1), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.output_norm.weight


# Residual stream and prefills


def test_every_prefill_equals_the_naive_one(model, idx):
    found = probe.prefills(model, idx, feedback=True)
    assert list(found) == PREFILLS
    wanted = {name: inputs(model, idx, n) for name, n in zip(PREFILLS, (0, 1, 2, 4, T - 1))}
    wanted |= {"fused": pass_inputs(model, idx, 1), "fused 3": pass_inputs(model, idx, 3)}
    for name, u in wanted.items():
        stream, state = stream_and_state(model, u)
        assert found[name][0].shape == (B, L + 1, 16) and found[name][1].shape == (B, 16)
        torch.testing.assert_close(found[name][0], stream, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[name][1], state, rtol=1e-4, atol=1e-5)
    states = torch.stack([state for _, state in found.values()])  # (7, B, D): else the above shows little
    assert torch.cdist(states.transpose(0, 1), states.transpose(0, 1)).add(torch.eye(7)).min() > 1e-3


def test_the_full_recurrence_is_what_t_passes_give(model, idx):
    h = probe.prefills(model, idx, feedback=True)["recurrent"][1]
    with torch.no_grad():
        torch.testing.assert_close(h, model.passes(idx, T)[-1][:, -1], rtol=1e-4, atol=1e-5)
        assert (h - model.passes(idx, 4)[-1][:, -1]).abs().max() > 1e-3


def test_without_feedback_there_is_the_standard_prefill_alone(idx):
    plain = GPT(GPTConfig(vocab_size=len(tasks.SYMBOLS), block_size=T, n_layer=L, n_head=2, n_embd=16, fusion="none"))
    found = probe.prefills(plain.eval(), idx, feedback=False)
    assert list(found) == ["standard"]
    torch.testing.assert_close(found["standard"][0], stream_and_state(plain, plain.embedding.weight[idx])[0])


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


def test_a_probe_reads_what_is_there_whatever_its_scale():
    draw = np.random.default_rng(0)
    groups, answers = np.repeat(np.arange(40), 10), np.tile([0, 1], 200)
    features = draw.normal(size=(400, 6))
    features[:, 2] += 4 * answers
    correct = probe.probe(features, answers, groups, 0)
    assert correct.shape == (400,) and 0.95 < correct.mean() < 1
    rescaled = features * [1e-4, 1, 1e3, 1, 1e5, 1] + 50
    np.testing.assert_array_equal(probe.probe(rescaled, answers, groups, 0), correct)


def test_a_probe_of_random_answers_is_at_chance():
    draw = np.random.default_rng(0)
    groups, answers = np.repeat(np.arange(200), 10), np.tile([0, 1], 1000)
    correct = probe.probe(draw.normal(size=(2000, 8)), answers, groups, 0)
    assert abs(correct.mean() - 0.5) < 0.05  # 4.5 standard deviations
    correct = probe.probe(np.full((2000, 8), 0.3), answers, groups, 0)  # all alike, as at depth 0
    assert correct.mean() == 0.5


def test_no_group_is_in_two_folds():
    """Features that name the group, answers that only the group knows: worthless unless a group leaks."""
    draw = np.random.default_rng(0)
    groups = np.repeat(np.arange(80), 8)
    answers = draw.permutation(np.tile([0, 1], 40))[groups]
    correct = probe.probe(np.eye(80)[groups], answers, groups, 0)
    assert correct.mean() < 0.65
    assert probe.probe(np.eye(80)[groups], answers, draw.permutation(640), 0).mean() > 0.99


def test_accuracy_and_its_error_over_groups_by_hand():
    # Group means 1, 0.5, 0: mean 0.5, deviation 0.5, error 0.5 / sqrt(3).
    found = probe.accuracy(np.array([1, 1, 0, 1, 0, 0], dtype=bool), 3)
    assert found == {"accuracy": 0.5, "error": pytest.approx(0.5 / 3 ** 0.5)}


# The experiment


def test_measure_counts_the_models_own_answers(tasks_run, few):
    model, checkpoint = probe.start([tasks_run], probe.Settings(data_dir=str(data_of(tasks_run))))[1][0][:2]
    symbols = checkpoint["tokenizer"]["symbols"]
    model.requires_grad_(False).embedding.weight.mul_(20)  # an untrained model's answers would all be the same
    examples = tasks.probe_sets(n_groups=4)["completion", 8]
    found = probe.measure(model, CharTokenizer(symbols), examples, True, 0)
    assert (found["examples"], found["groups"], found["length"]) == (80, 4, 62)
    assert list(found["prefills"]) == PREFILLS
    rows = torch.tensor([[symbols.index(c) for c in example.prompt] for example in examples])
    fed = {name: inputs(model, rows, n) for name, n in zip(PREFILLS, (0, 1, 2, 4, 61))}
    fed |= {"fused": pass_inputs(model, rows, 1), "fused 3": pass_inputs(model, rows, 3)}
    right, unrestricted = dict.fromkeys(PREFILLS, 0), dict.fromkeys(PREFILLS, 0)
    for name, u in fed.items():
        for logits, example in zip(stream_and_state(model, u)[1] @ model.embedding.weight.T, examples, strict=True):
            more, done = logits[symbols.index("m")], logits[symbols.index("d")]
            right[name] += ("d" if done > more else "m") == example.answer
            unrestricted[name] += symbols[int(logits.argmax())] == example.answer
    for name, by in found["prefills"].items():
        assert len(by["depths"]) == 3
        assert by["answer"]["accuracy"] * 80 == pytest.approx(right[name])
        assert by["unrestricted"]["accuracy"] * 80 == pytest.approx(unrestricted[name])
    assert len(set(right.values())) > 1 and right != unrestricted


def data_of(run: str):
    return torch.load(f"{run}/ckpt.pt", weights_only=True)["train_config"]["data_dir"]


def test_the_experiment_from_end_to_end(tasks_run, make, data, few, tmp_path, capsys, monkeypatch):
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: (figures.append(figure),
                                                                          savefig(figure, *args, **more)))
    plain = make(name="plain", fusion="none", pass_mix=(1.0,))
    words = [tasks_run, plain, f"--data_dir={data}", f"--results_dir={tmp_path}/results", "--limit=4",
             f"--cache_dir={tmp_path}/kept"]
    assert probe.main(words) == 0
    assert (tmp_path / "results/probe.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "results/probe.json").read_text())
    assert result["settings"]["limit"] == 4
    for name, prefills in (("run", PREFILLS), ("plain", PREFILLS[:1])):
        sets = result["checkpoints"][name]["sets"]
        assert {task: {n: numbers["examples"] for n, numbers in swept.items()} for task, swept in sets.items()} == {
            "completion": {"0": 80, "8": 80}, "memory": {"0": 40, "8": 40}, "registers": {"8": 64}, "writes": {"2": 64}}
        for numbers in (numbers for swept in sets.values() for numbers in swept.values()):
            assert list(numbers["prefills"]) == prefills
            assert numbers["prefills"]["standard"]["depths"][0] == {"accuracy": 0.5, "error": 0.0}
        assert sets["registers"]["8"] == sets["writes"]["2"]
    by = result["checkpoints"]["run"]["sets"]["completion"]["0"]["prefills"]
    assert by["last 1"]["depths"][0] == by["fused"]["depths"][0] != by["standard"]["depths"][0]

    out = capsys.readouterr().out
    assert "plain, standard prefill only: " in out and "run, standard" not in out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 12
    row = next(row for row in rows if row[:3] == ["run", "memory", "8"])
    sets = result["checkpoints"]["run"]["sets"]
    by = sets["memory"]["8"]["prefills"]
    wanted = [by[name]["depths"][0] for name in PREFILLS[:5]] + [by["standard"]["depths"][2]]
    wanted += [by[name]["answer"] for name in ("standard", "last 4", "recurrent", "fused", "fused 3")]
    assert [float(cell) for cell in row[3:]] == pytest.approx([one["accuracy"] for one in wanted], abs=1e-4)

    monkeypatch.setattr(probe, "measure", lambda *args: 1 / 0)  # what was measured is kept, by weights and settings
    assert probe.main(words) == 0
    assert json.loads((tmp_path / "results/probe.json").read_text())["checkpoints"] == result["checkpoints"]
    with pytest.raises(ZeroDivisionError):
        probe.main([*words, "--seed=1"])
    with pytest.raises(ZeroDivisionError):
        probe.main([make(name="other", seed=2), *words[2:]])
    figure = figures[0]
    assert len(figures) == 2 and len(figure.axes) == 16
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[1] == "run: memory 8" and titles[9] == "plain: memory 8" and titles[6] == "run: registers, depth 0"
    curves = {c.get_label(): list(c.lines[0].get_ydata()) for c in figure.axes[1].containers}
    assert curves == {name: [one["accuracy"] for one in by[name]["depths"]] for name in PREFILLS}
    curves = {c.get_label(): list(c.lines[0].get_ydata()) for c in figure.axes[3].containers}
    assert curves == {name: [numbers["prefills"][name]["answer"]["accuracy"] for swept in sets.values()
                             for numbers in swept.values()] for name in PREFILLS}
    curves = {c.get_label(): list(c.lines[0].get_ydata()) for c in figure.axes[5].containers}
    assert curves["last 1"] == [sets["memory"][n]["prefills"]["last 1"]["depths"][0]["accuracy"] for n in ("0", "8")]


def test_mistakes_are_refused_in_one_line(tasks_run, make, data, tiny_run, corpus, few, tmp_path, monkeypatch):
    place = (f"--data_dir={data}", f"--results_dir={tmp_path}/no", f"--cache_dir={tmp_path}/kept")
    assert "checkpoint" in refused(*place)
    assert "limit=3" in refused(tasks_run, *place, "--limit=3")
    message = refused(tiny_run, f"--data_dir={corpus}")
    assert tiny_run in message and "lacks" in message and "config/tasks.toml" in message
    short = make(name="short", block_size=100)
    message = refused(short, *place)
    assert "block_size=100" in message and "180" in message and "--block_size=180" in message
    assert not (tmp_path / "no").exists()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else found(name))
    assert "pip install scikit-learn" in refused(tasks_run, *place)
