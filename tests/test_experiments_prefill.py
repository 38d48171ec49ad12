"""experiments: report, loss_curves, prefill_passes and decoding_modes, against loops and hand numbers written here.

Of the model only `stack` without a cache is used to make an expectation (test_model.py holds that to a naive decoder):
fusion, shift, passes, prompts and decoding are spelled out below, from the weights.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from harness.checkpoint import load_model
from harness.configurator import UserError
from experiments import decoding_modes, loss_curves, prefill_passes, report
from model import GPT
from harness.tokenizer import CharTokenizer

HERE = Path(__file__).parents[1]
T, N = 16, 20  # the fixtures' block_size; windows in these tests, more than a batch of prefill_passes
MODES = ("standard", "soft", "fused")


@pytest.fixture(scope="module")
def learned(make_run) -> str:
    """A run long enough for its states, and so its modes, to differ by more than noise."""
    return make_run(max_iters=120, learning_rate=5e-3, eval_interval=0)


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that are saved from now on."""
    saved, savefig = [], Figure.savefig

    def keep(figure, *args, **kwargs):
        saved.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def run_experiment(experiment, corpus, tmp_path, *words) -> dict:
    """Its JSON after main([...]); the PNG is one."""
    name = experiment.__name__.split(".")[1]
    assert experiment.main([*words, f"--data_dir={corpus}", f"--results_dir={tmp_path}/new/results"]) == 0
    assert (tmp_path / f"new/results/{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((tmp_path / f"new/results/{name}.json").read_text())


def refused(experiment, *words) -> str:
    with pytest.raises(UserError) as error:
        experiment.main(list(words))
    return str(error.value)


def lines(axes) -> dict[str, list[float]]:
    """The y values of an axes' lines by label, with their x values."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


# Expectations


def validation(corpus) -> np.ndarray:
    symbols = json.loads((Path(corpus) / "tiny/meta.json").read_text())["tokenizer"]["symbols"]
    assert len(symbols) < 256
    return np.fromfile(Path(corpus) / "tiny/val.bin", dtype="uint16").astype(np.int64)


def rows_of(tokens, n, length=T + 1) -> torch.Tensor:
    """n windows (n, length), the first at the split's start, the last at its end, the others evenly between."""
    starts = [int(i * (len(tokens) - length) / max(n - 1, 1)) for i in range(n)]
    return torch.tensor(np.array([tokens[start:start + length] for start in starts]))


def fused(model, h, e) -> torch.Tensor:
    """Eq. (4) at one position: h, e (B, D)."""
    e = e / (e.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.input_norm.weight
    return (h @ model.fusion.W_H.weight.T) / (1 + torch.exp(-(e @ model.fusion.W_G.weight.T)))


def nll(model, h, target) -> torch.Tensor:
    """-log p(target): h (B, D), target (B,) -> (B,)."""
    logits = h @ model.embedding.weight.T
    return torch.logsumexp(logits, -1) - logits[torch.arange(len(target)), target]


@torch.no_grad()
def naive_passes(model, rows, n_passes) -> tuple[list[float], list[float]]:
    """Losses after 0..n_passes feedback passes and the changes of passes 1.., all states kept, no stopping early."""
    e = model.embedding.weight[rows[:, :-1]]
    states, losses, changes = [model.stack(e)], [], []
    for _ in range(n_passes):
        u = torch.stack([e[:, 0], *(fused(model, states[-1][:, t - 1], e[:, t]) for t in range(1, e.size(1)))], dim=1)
        states.append(model.stack(u))
    for k, h in enumerate(states):
        losses.append(np.mean([nll(model, h[:, t], rows[:, t + 1]).numpy() for t in range(h.size(1))]))
        if k:
            ratios = [(h[b, t] - states[k - 1][b, t]).norm() / h[b, t].norm()
                      for b in range(h.size(0)) for t in range(h.size(1))]
            changes.append(np.mean(ratios))
    return losses, changes


@torch.no_grad()
def naive_inputs(model, idx, n_prompt, mode, n_extra=1) -> torch.Tensor:
    """u (B, T, D) as fed by each mode, the states recomputed from all the inputs before, without cache."""
    e = model.embedding.weight[idx]
    u = [e[:, t] for t in range(n_prompt)]
    for _ in range(n_extra if mode == "fused" else 0):
        h = model.stack(torch.stack(u, dim=1))
        u = [e[:, 0], *(fused(model, h[:, t - 1], e[:, t]) for t in range(1, n_prompt))]
    for t in range(n_prompt, idx.size(1)):
        h = model.stack(torch.stack(u, dim=1))[:, -1]
        u.append(e[:, t] if mode == "standard" else fused(model, h, e[:, t]))
    return torch.stack(u, dim=1)


@torch.no_grad()
def naive_likelihood(model, rows, n_prompt, mode, n_extra=1) -> np.ndarray:
    """NLL (B, T - n_prompt + 1) of tokens n_prompt.. of rows (B, T + 1)."""
    u = naive_inputs(model, rows[:, :-1], n_prompt, mode, n_extra)
    return np.array([nll(model, model.stack(u[:, :t])[:, -1], rows[:, t]).numpy()
                     for t in range(n_prompt, rows.size(1))], dtype=float).T


@torch.no_grad()
def naive_greedy(model, prompts, n_new, mode) -> torch.Tensor:
    idx = prompts
    for _ in range(n_new):
        h = model.stack(naive_inputs(model, idx, prompts.size(1), mode))[:, -1]
        idx = torch.cat([idx, (h @ model.embedding.weight.T).argmax(-1)[:, None]], dim=1)
    return idx[:, prompts.size(1):]


# report


def test_table_by_hand():
    assert report.table(["run", "loss"], [["a", 1.23456], ["longer", ""], ["c", 12]]) == (
        "| run    | loss  |\n"
        "|--------|-------|\n"
        "| a      | 1.235 |\n"
        "| longer |       |\n"
        "| c      | 12    |")


def test_held_out_windows_are_even_and_hold_each_next_token(corpus, tiny_run):
    model, _ = load_model(tiny_run)
    tokens = validation(corpus)
    idx, targets = report.held_out(model, tokens, 7)
    expected = rows_of(tokens, 7)
    assert idx.tolist() == expected[:, :-1].tolist() and targets.tolist() == expected[:, 1:].tolist()


def test_labels_are_folder_names_unless_two_are_the_same(tmp_path):
    for name in ("one/run", "two/run", "two/other"):
        (tmp_path / name).mkdir(parents=True)
    first, second, other = (str(tmp_path / name) for name in ("one/run", "two/run", "two/other"))
    assert report.labels([first, f"{other}/ckpt.pt"]) == ["run", "other"]
    assert report.labels([first, second]) == [first, second]


def test_json_says_how_it_came_about(corpus, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prefill_passes.py", tiny_run, "--seed=5", "--device=cpu"])
    numbers = run_experiment(prefill_passes, corpus, tmp_path, *sys.argv[1:])
    assert numbers["command"] == f"python -m experiments.prefill_passes {tiny_run} --seed=5 --device=cpu"
    assert numbers["settings"]["seed"] == 5 and numbers["settings"]["n_windows"] == 120
    assert numbers["device"] == "cpu" and numbers["torch"] == torch.__version__
    assert 0 < numbers["seconds"] < 60 and len(numbers["date"]) == 10


def test_the_command_can_be_pasted_and_git_may_be_missing(corpus, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["decoding_modes.py", tiny_run, "--stop=\n x", "--n_samples=1", "--n_windows=1",
                                      "--max_new_tokens=4"])
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    numbers = run_experiment(decoding_modes, corpus, tmp_path, *sys.argv[1:])
    assert numbers["commit"] == "unknown"
    assert shlex.split(numbers["command"]) == ["python", "-m", "experiments.decoding_modes", *sys.argv[1:]]
    (tmp_path / "bin/git").write_text("#!/bin/sh\necho 1a2b3c-dirty\n")
    (tmp_path / "bin/git").chmod(0o755)
    assert report.commit() == "1a2b3c-dirty"
    (tmp_path / "bin/git").write_text("#!/bin/sh\necho not a repository >&2\nexit 128\n")
    assert report.commit() == "unknown"


def test_a_results_dir_that_cannot_be_is_named(corpus, tiny_run, tmp_path):
    (tmp_path / "file").write_text("")
    bad = f"--results_dir={tmp_path}/file/x"
    assert bad in refused(prefill_passes, tiny_run, "--n_windows=1", f"--data_dir={corpus}", bad)


def test_another_text_is_refused(tiny_run, tmp_path):
    import prepare

    (tmp_path / "tiny.txt").write_text("another text " * 200)
    prepare.main([f"--input={tmp_path}/tiny.txt", f"--data_dir={tmp_path}"])
    for experiment in (prefill_passes, decoding_modes):
        assert "another text" in refused(experiment, tiny_run, f"--data_dir={tmp_path}", f"--results_dir={tmp_path}/r")
    assert not (tmp_path / "r").exists()


# loss_curves


EVALUATIONS = [{"step": step, "val_losses": losses} for step, losses in
               [(0, [3.0, 3.1]), (10, [2.5, 2.4]), (20, [2.0, 2.1]), (30, [1.9, 1.8]), (40, [1.8, 1.7])]]


def test_crossing_is_where_pass_2_stays_under():
    steps = np.array([0.0, 10, 20, 30, 40])
    assert loss_curves.crossing(steps, np.array([0.1, -0.1, 0.1, -0.1, -0.1])) == 30
    assert loss_curves.crossing(steps[:3], np.array([0.1, -0.1, 0.0])) is None
    assert loss_curves.crossing(steps, np.full(5, -0.1)) == 0
    assert loss_curves.crossing(steps[:0], steps[:0]) is None  # a plain model


def test_loss_curves_draw_the_log(tmp_path, figures, capsys):
    training = [{"step": step, "passes": 1 if step < 3 else 2, "losses": [8.0 / step] + [6.0] * (step >= 3)}
                for step in range(1, 5)]
    training += [{"step": step, "passes": 2, "losses": [2.0, 1.0]} for step in (5, 6)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in EVALUATIONS + training))
    assert loss_curves.main([str(tmp_path), "--smooth=2"]) == 0
    losses, gaps = (lines(axes) for axes in figures[0].axes)
    steps = [0, 10, 20, 30, 40]
    assert losses["pass 1, validation"] == (steps, [3.0, 2.5, 2.0, 1.9, 1.8])
    assert losses["pass 2, validation"] == (steps, [3.1, 2.4, 2.1, 1.8, 1.7])
    steps_1, smooth_1 = losses["pass 1, training"]
    assert steps_1 == [2, 3, 4, 5, 6]  # each at the last step that it averages
    assert smooth_1[:2] == pytest.approx([(8 + 4) / 2, (4 + 8 / 3) / 2])
    assert losses["pass 2, training"][0] == [4, 5, 6]
    assert losses["pass 2, training"][1] == pytest.approx([6, (6 + 1) / 2, 1])
    assert gaps["pass 2, validation"][1] == pytest.approx([0.1, -0.1, 0.1, -0.1, -0.1])
    assert gaps["pass 2, training"][1] == pytest.approx([((6 - 8 / 3) + (6 - 2)) / 2, ((6 - 2) + (1 - 2)) / 2, -1])
    assert (tmp_path / "loss.png").is_file() and "under pass 1 from step 6 on" in capsys.readouterr().out


def test_loss_curves_of_a_run(tiny_run, plain_run, tmp_path, figures):
    for folder, n_passes in ((tiny_run, 3), (plain_run, 1)):
        loss_curves.main([folder, f"--out={tmp_path}/loss.png"])
        labels = lines(figures[-1].axes[0])
        assert [f"pass {k}, validation" in labels for k in (1, 2, 3)] == [k <= n_passes for k in (1, 2, 3)]


def test_loss_curves_say_when_there_is_nothing_to_compare(plain_run, tiny_run, tmp_path, capsys):
    for arguments in ([plain_run], [tiny_run, "--smooth=1000"]):
        loss_curves.main([*arguments, f"--out={tmp_path}/loss.png"])
        assert "not logged often enough" in capsys.readouterr().out


def test_loss_curves_name_the_mistake(tmp_path):
    assert "one run's folder" in refused(loss_curves)
    assert str(tmp_path / "log.jsonl") in refused(loss_curves, str(tmp_path))
    assert "smooth=0" in refused(loss_curves, str(tmp_path), "--smooth=0")
    (tmp_path / "log.jsonl").write_text('{"step": 0, "val_losses": [2.0]}\n{"step": 1, "passes": 1, "losses": [2.0]}\n')
    for out in (f"{tmp_path}/no/a.png", f"{tmp_path}/a.xyz"):
        assert f"--out={out}" in refused(loss_curves, str(tmp_path), f"--out={out}")
    (tmp_path / "log.jsonl").write_text("garbage\n")
    assert "'garbage' is no line of a log" in refused(loss_curves, str(tmp_path))
    (tmp_path / "log.jsonl").write_text('{"step": 1, "passes": 1, "losses": [2.0]}\n')
    assert "--eval_iters" in refused(loss_curves, str(tmp_path))


# prefill_passes


def test_losses_and_changes_equal_a_naive_recomputation(corpus, learned, tmp_path, figures, capsys):
    model, _ = load_model(learned)
    losses, changes = naive_passes(model, rows_of(validation(corpus), N), 8)
    numbers = run_experiment(prefill_passes, corpus, tmp_path, learned, f"--n_windows={N}")
    result = numbers["checkpoints"]["run"]
    assert numbers["passes"] == 8 and result["n_windows"] == N and result["checkpoint"] == learned
    assert result["losses"] == pytest.approx(losses, abs=2e-5)
    assert result["changes"] == pytest.approx(changes, abs=2e-5)
    assert max(losses) - min(losses) > 1e-3 and min(changes) > 1e-4  # it was not all the same
    assert lines(figures[0].axes[0])["run"] == (list(range(9)), result["losses"]) and len(figures[0].axes) == 1
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
             if line.startswith("|")]
    assert table[0] == ["feedback passes", "run: loss"]
    assert table[2:] == [[str(k), f"{result['losses'][k]:.4g}"] for k in (0, 1, 2, 3, 4, 8)]


def test_zero_feedback_passes_are_plain_prefill_and_a_plain_model_a_level(corpus, learned, plain_run, tmp_path, figures,
                                                                          capsys):
    numbers = run_experiment(prefill_passes, corpus, tmp_path, plain_run, learned, f"--n_windows={N}", "--long",
                             "--passes=3")
    rows = rows_of(validation(corpus), N)
    for path in (plain_run, learned):
        model, _ = load_model(path)
        with torch.no_grad():
            h = model.stack(model.embedding.weight[rows[:, :-1]])
            expected = np.mean([nll(model, h[:, t], rows[:, t + 1]).numpy() for t in range(T)])
        result = numbers["checkpoints"][path]  # both folders are named `run`
        assert result["losses"][0] == pytest.approx(expected, abs=1e-5)
    assert len(numbers["checkpoints"][plain_run]["losses"]) == 1 and not numbers["checkpoints"][plain_run]["changes"]
    loss_panel, change_panel = figures[0].axes
    x, y = lines(loss_panel)[plain_run]
    assert x == [0, 1] and y == numbers["checkpoints"][plain_run]["losses"] * 2  # axhline, from edge to edge
    assert [len(line.get_xdata()) for line in change_panel.lines if line.get_linestyle() == "-"] == [0, 3]
    out = capsys.readouterr().out
    assert f"{plain_run} never trained latent feedback" in out and "--init_from" in out
    assert prefill_passes.main([plain_run, "--long", f"--data_dir={corpus}", f"--results_dir={tmp_path}"]) == 0


def test_a_fusion_without_feedback_steps_is_a_level_too(corpus, make_run, tmp_path):
    untrained = make_run(pass_mix=(1.0,), max_iters=2)
    result = run_experiment(prefill_passes, corpus, tmp_path, untrained)["checkpoints"]["run"]
    assert len(result["losses"]) == 1 and result["changes"] == []


def test_long_is_exact_beyond_the_window_and_keeps_no_states(corpus, learned, tmp_path, figures, monkeypatch):
    alive, most_alive, next_pass = [], [], GPT.next_pass

    def watched(self, *args, **kwargs):
        h = next_pass(self, *args, **kwargs)
        alive.append(weakref.ref(h))
        most_alive.append(sum(reference() is not None for reference in alive))
        return h

    monkeypatch.setattr(GPT, "next_pass", watched)
    numbers = run_experiment(prefill_passes, corpus, tmp_path, learned, "--n_windows=5", "--long")
    model, _ = load_model(learned)
    losses, changes = naive_passes(model, rows_of(validation(corpus), 5), T + 4)
    result = numbers["checkpoints"]["run"]
    assert len(result["losses"]) == 1001 and len(result["changes"]) == 1000
    assert result["losses"][:T + 5] == pytest.approx(losses, abs=2e-5)
    assert result["changes"][:T + 4] == pytest.approx(changes, abs=2e-5)
    assert set(result["losses"][T - 1:]) == {result["losses"][T - 1]}  # position T is exact after T - 1 feedback passes
    assert set(result["changes"][T - 1:]) == {0.0} and 0 < result["changes"][T - 2]
    assert max(most_alive) <= 3 and len(most_alive) == T  # the pass that changes nothing is the last one run
    loss_panel, change_panel = figures[0].axes
    assert loss_panel.get_xscale() == "symlog" and change_panel.get_xscale() == change_panel.get_yscale() == "log"
    x, y = next((list(line.get_xdata()), list(line.get_ydata())) for line in change_panel.lines
                if line.get_linestyle() == "-")
    assert x == list(range(1, T)) and y == result["changes"][:T - 1]
    assert {tuple(line.get_xdata()) for panel in figures[0].axes for line in panel.lines
            if line.get_linestyle() == ":"} == {(T, T)}


def test_prefill_passes_names_the_mistake(corpus, tiny_run, tmp_path):
    assert "at least one checkpoint" in refused(prefill_passes)
    assert "passes=-1" in refused(prefill_passes, tiny_run, "--passes=-1")
    assert "n_windows=0" in refused(prefill_passes, tiny_run, "--n_windows=0")
    assert str(tmp_path) in refused(prefill_passes, str(tmp_path), f"--data_dir={corpus}")


def test_a_mistake_is_one_line_and_exit_code_2():
    done = subprocess.run([sys.executable, "-m", "experiments.decoding_modes", "--temprature=1"], cwd=HERE, text=True,
                          capture_output=True, check=False, env=os.environ)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "--temprature" in done.stderr and "temperature" in done.stderr


# decoding_modes


@pytest.mark.parametrize("n_prompt, n_extra", [(0, 1), (1, 2), (11, 3), (15, 1)])
def test_likelihood_equals_a_naive_uncached_recomputation(corpus, learned, tmp_path, figures, n_prompt, n_extra):
    model, _ = load_model(learned)
    rows, own_prompt = rows_of(validation(corpus), 60), n_prompt or T // 2
    numbers = run_experiment(decoding_modes, corpus, tmp_path, learned, "--n_windows=60", f"--n_prompt={n_prompt}",
                             f"--prefill_passes={n_extra}", "--n_samples=2", "--max_new_tokens=4")
    result = numbers["checkpoints"]["run"]
    assert result["n_prompt"] == own_prompt and result["n_windows"] == 60 and list(result["modes"]) == list(MODES)
    expected = {mode: naive_likelihood(model, rows, own_prompt, mode, n_extra) for mode in MODES}
    for mode in MODES:
        got, difference = result["modes"][mode], expected[mode] - expected["standard"]
        assert got["nll_by_position"] == pytest.approx(expected[mode].mean(0), abs=2e-5)
        assert len(got["nll_by_position"]) == T - own_prompt + 1
        assert got["nll"] == pytest.approx(expected[mode].mean(), abs=2e-5)
        assert got["difference"] == pytest.approx(difference.mean(), abs=2e-5)
        by_position = [part["difference"] for part in got["bins"]]  # a window this short has a bin for each position
        assert by_position == pytest.approx(difference.mean(0), abs=2e-5)
        assert [part["position"] for part in got["bins"]] == [t + 1 for t in range(T - own_prompt + 1)]
        # The interval against the normal approximation, of the mean over windows of their differences: paired.
        error = 1.96 * difference.mean(1).std() / math.sqrt(60)
        low, high = got["interval"]
        assert low == pytest.approx(difference.mean() - error, abs=0.25 * error + 1e-6)
        assert high == pytest.approx(difference.mean() + error, abs=0.25 * error + 1e-6)
        assert all(part["interval"][0] <= part["difference"] <= part["interval"][1] for part in got["bins"])
    assert result["modes"]["soft"]["nll_by_position"][0] == pytest.approx(expected["standard"].mean(0)[0], abs=1e-5)
    assert result["modes"]["soft"]["difference"] != 0 != result["modes"]["fused"]["difference"]
    drawn = lines(figures[0].axes[0])
    assert set(drawn["Standard"][1]) == {0}  # the zero line
    for mode in ("soft", "fused"):
        bins = result["modes"][mode]["bins"]
        assert drawn[f"run, {mode.capitalize()}"] == ([part["position"] for part in bins],
                                                      [part["difference"] for part in bins])


def test_long_windows_are_binned(corpus, make_run, tmp_path):
    long_window = make_run(block_size=64, max_iters=3)
    result = run_experiment(decoding_modes, corpus, tmp_path, long_window, "--n_windows=3", "--n_prompt=10",
                            "--n_samples=2", "--max_new_tokens=4")["checkpoints"]["run"]["modes"]
    by_position = np.subtract(result["soft"]["nll_by_position"], result["standard"]["nll_by_position"])  # (55,)
    sizes = [4] * 7 + [3] * 9  # 55 positions in 16 bins, the larger ones first
    starts = np.cumsum([0, *sizes])
    assert [part["difference"] for part in result["soft"]["bins"]] == pytest.approx(
        [by_position[start:start + size].mean() for start, size in zip(starts, sizes)], abs=1e-6)
    assert [part["position"] for part in result["soft"]["bins"]] == [
        start + (size + 1) / 2 for start, size in zip(starts, sizes)]


def test_windows_do_not_overlap(corpus, tiny_run, tmp_path):
    tokens = validation(corpus)
    result = run_experiment(decoding_modes, corpus, tmp_path, tiny_run, "--n_windows=100000", "--n_samples=1",
                            "--max_new_tokens=4")["checkpoints"]["run"]
    assert result["n_windows"] == (len(tokens) - 1) // T


def test_samples_are_measured(corpus, learned, tmp_path):
    """Greedy, within the window: against naive decoding, text searched by str, 4-grams counted in a dict."""
    model, checkpoint = load_model(learned)
    symbols = checkpoint["tokenizer"]["symbols"]
    texts = rows_of(validation(corpus), 9, length=4 + 12)
    prompts = texts[:, :4]
    result = run_experiment(decoding_modes, corpus, tmp_path, learned, "--n_windows=2", "--n_prompt=4", "--n_samples=9",
                            "--max_new_tokens=12", "--temperature=0", "--stop=1\n")["checkpoints"]["run"]
    expected = {mode: naive_greedy(model, prompts, 12, mode) for mode in MODES}
    measured = {mode: result["modes"][mode]["samples"] for mode in MODES}
    some_stop = some_do_not = False
    for rows, got in [(expected[mode], measured[mode]) for mode in MODES] + [(texts[:, 4:], result["held_out_text"])]:
        lengths, shares = [], []
        for row in rows.tolist():
            text = "".join(symbols[i] for i in row)
            lengths.append(text.find("1\n") + 2 if "1\n" in text else None)
            seen = {}
            for start in range(9):
                seen[text[start:start + 4]] = seen.get(text[start:start + 4], 0) + 1
            shares.append(sum(times - 1 for times in seen.values()) / 9)
        assert got["lengths"] == [length or 12 for length in lengths]
        assert got["median_length"] == sorted(length or 12 for length in lengths)[4]
        assert got["never_stopped"] == pytest.approx(lengths.count(None) / 9)
        assert got["repeated_4grams"] == pytest.approx(sum(shares) / 9)
        some_stop, some_do_not = some_stop or set(lengths) != {None}, some_do_not or None in lengths
    assert some_stop and some_do_not


def test_samples_depend_on_the_seed_alone_and_share_it_over_modes(corpus, tiny_run, tmp_path, monkeypatch):
    drawn, generate = [], GPT.generate

    def watched(self, *args, **kwargs):
        drawn.append([])
        for token, log_prob in generate(self, *args, **kwargs):
            drawn[-1].append(token.tolist())
            yield token, log_prob

    monkeypatch.setattr(GPT, "generate", watched)
    for seed in (1, 1, 2):
        torch.manual_seed(len(drawn))
        run_experiment(decoding_modes, corpus, tmp_path, tiny_run, "--n_windows=2", f"--seed={seed}", "--n_samples=3",
                       "--max_new_tokens=20")
    assert drawn[0:3] == drawn[3:6] and drawn[0] != drawn[6]
    assert drawn[0][0] == drawn[1][0]  # Soft's first token is Standard's: same state, same draw


def test_a_plain_model_is_decoded_in_standard_alone(corpus, plain_run, learned, tmp_path, capsys):
    numbers = run_experiment(decoding_modes, corpus, tmp_path, plain_run, learned, "--n_windows=4", "--n_samples=2",
                             "--max_new_tokens=5")["checkpoints"]
    assert list(numbers[plain_run]["modes"]) == ["standard"] and list(numbers[learned]["modes"]) == list(MODES)
    out = capsys.readouterr().out
    assert f"{plain_run}, Standard only: {plain_run} never trained latent feedback" in out
    assert [line.split("|")[2].strip() for line in out.splitlines() if line.startswith("|")][2:] == [
        "standard", "the text itself", *MODES, "the text itself"]


def test_decoding_modes_names_the_mistake(corpus, tiny_run, tmp_path):
    def complaint(*words):
        return refused(decoding_modes, tiny_run, f"--data_dir={corpus}", f"--results_dir={tmp_path}", *words)

    assert "at least one checkpoint" in refused(decoding_modes)
    assert "--n_prompt=16" in complaint("--n_prompt=16") and "at most 15" in complaint("--n_prompt=16")
    n_tokens = len(validation(corpus))
    assert f"at most {n_tokens - 8} follow" in complaint(f"--max_new_tokens={n_tokens - 7}")
    for word in ("--n_prompt=-1", "--prefill_passes=0", "--n_samples=0", "--max_new_tokens=3", "--temperature=-1"):
        assert word.lstrip("-") in complaint(word)
    assert "stop" in complaint("--stop=")
    assert not list(tmp_path.iterdir())


def test_bootstrap_on_hand_data():
    one_of_ten = np.array([1.0] + [0.0] * 9)  # the sum is binomial(10, 0.1): P(<= 2) = 0.930, P(<= 3) = 0.987
    constant, first, negative = decoding_modes.bootstrap(np.stack([np.full(10, 0.25), one_of_ten, -one_of_ten], 1), 1)
    assert constant == [0.25, 0.25] and first == pytest.approx([0, 0.3]) and negative == pytest.approx([-0.3, 0])
    assert decoding_modes.bootstrap(np.array([[0.0], [1.0]]), 1) == [[0, 1]]  # means 0, 1/2, 1: shares 1/4, 1/2, 1/4
    assert decoding_modes.bootstrap(one_of_ten[:, None], 1, np.median) == [[0, 0]]  # five ones of ten: 0.2%
    values = np.random.default_rng(0).normal(3, 2, (400, 1))
    interval, error = decoding_modes.bootstrap(values, 1), 1.96 * values.std() / 20
    assert interval[0] == pytest.approx([values.mean() - error, values.mean() + error], abs=0.1 * error)
    assert decoding_modes.bootstrap(values, 1) == interval != decoding_modes.bootstrap(values, 2)


def test_repeated_4grams_on_hand_strings():
    def share(text):
        return decoding_modes.repeated([ord(character) for character in text])

    assert share("abcd") == share("abcdefgh") == 0
    assert share("abcdabcd") == pytest.approx(1 / 5)  # abcd bcda cdab dabc, and abcd again
    assert share("aaaaaaa") == pytest.approx(3 / 4)


def test_stop_length_counts_up_to_the_end_of_the_first_stop():
    tokenizer = CharTokenizer("\nab")

    def length(text, stop):
        return decoding_modes.stop_length(tokenizer, tokenizer.encode(text), stop)

    assert length("ab\n\nab\n\n", "\n\n") == 4
    assert length("\n\n", "\n\n") == 2
    assert length("a\nb\na", "\n\n") is None
    assert length("a\n\n\nb", "\n\n") == 3
