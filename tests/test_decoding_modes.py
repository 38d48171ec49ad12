"""experiments/decoding_modes.py against uncached loops, hand numbers and groups made by hand."""

import math

import numpy as np
import pytest
import torch
from by_hand import (
    T,
    lines_of,
    naive_greedy,
    naive_likelihood,
    refused,
    run_experiment,
    saved_figures,
    table_rows,
    validation,
    window_rows,
)

from experiments import decoding_modes
from harness.checkpoint import load_model
from harness.tokenizer import CharTokenizer
from model import GPT

MODES = ("standard", "soft", "fused")
FEW = ("--n_samples=2", "--max_new_tokens=4")


def by_decoded(numbers: dict) -> dict[str, dict]:
    """The rows of the last table by their first cell."""
    return {row["decoded"]: row for row in numbers["rows"]}


@pytest.mark.parametrize("n_prompt, n_extra", [(0, 1), (1, 2), (11, 3), (15, 1)])
def test_likelihood_equals_a_naive_uncached_recomputation(
    corpus, learned, tmp_path, monkeypatch, n_prompt, n_extra
):
    figures = saved_figures(monkeypatch)
    model, _ = load_model(learned)
    rows = window_rows(validation(corpus), 60)
    own_prompt = n_prompt or T // 2
    words = ("--n_windows=60", f"--n_prompt={n_prompt}", f"--prefill_passes={n_extra}", *FEW)
    numbers = run_experiment(decoding_modes, corpus, tmp_path, learned, *words)
    result = numbers["checkpoints"]["run"]
    assert result["n_prompt"] == own_prompt and result["n_windows"] == 60
    assert list(result["modes"]) == list(MODES) and numbers["baseline"] == "Standard"
    expected = {mode: naive_likelihood(model, rows, own_prompt, mode, n_extra) for mode in MODES}
    drawn = lines_of(figures[0].axes[0])
    assert set(drawn["Standard"][1]) == {0}  # the zero line
    for mode in MODES:
        got = result["modes"][mode]
        difference = expected[mode] - expected["standard"]
        assert got["nll_by_position"] == pytest.approx(expected[mode].mean(0), abs=2e-5)
        assert len(got["nll_by_position"]) == T - own_prompt + 1
        assert got["nll"] == pytest.approx(expected[mode].mean(), abs=2e-5)
        assert got["difference"] == pytest.approx(difference.mean(), abs=2e-5)
        # Against the normal approximation, of the mean over windows of differences: paired.
        error = 1.96 * difference.mean(1).std() / math.sqrt(60)
        low, high = got["interval"]
        assert low == pytest.approx(difference.mean() - error, abs=0.25 * error + 1e-6)
        assert high == pytest.approx(difference.mean() + error, abs=0.25 * error + 1e-6)
        row = by_decoded(numbers)[f"run, {mode.capitalize()}"]
        if mode == "standard":
            assert "minus" not in row
            continue
        assert row["minus"] == pytest.approx(difference.mean(), abs=2e-5) and row["minus"] != 0
        assert row["interval"] == pytest.approx(got["interval"])
        assert row["interval_over"] == "windows"
        # A window this short has a bin for each position.
        by_position = [point["minus"] for point in row["bins"]]
        assert by_position == pytest.approx(difference.mean(0), abs=2e-5)
        positions = [point["position"] for point in row["bins"]]
        assert positions == [t + 1 for t in range(T - own_prompt + 1)]
        for point in row["bins"]:
            low, high = point["interval"]
            assert low <= point["minus"] <= high
        assert drawn[f"run, {mode.capitalize()}"] == (positions, by_position)
    first = result["modes"]["soft"]["nll_by_position"][0]
    assert first == pytest.approx(expected["standard"].mean(0)[0], abs=1e-5)


def test_a_plain_run_is_the_baseline_of_every_mode(
    corpus, learned, plain_run, tmp_path, monkeypatch, capsys
):
    figures = saved_figures(monkeypatch)
    words = (plain_run, learned, "--n_windows=30", *FEW)
    numbers = run_experiment(decoding_modes, corpus, tmp_path, *words)
    rows = window_rows(validation(corpus), 30)
    plain, _ = load_model(plain_run)
    model, _ = load_model(learned)
    base = naive_likelihood(plain, rows, T // 2, "standard")
    named = by_decoded(numbers)
    assert numbers["baseline"] == plain_run  # both folders are named `run`
    assert list(numbers["checkpoints"][plain_run]["modes"]) == ["standard"]
    assert named[plain_run]["nll"] == pytest.approx(base.mean(), abs=2e-5)
    assert "minus" not in named[plain_run] and named[plain_run]["computation"] == 1
    for mode in MODES:
        row = named[f"{learned}, {mode.capitalize()}"]
        difference = naive_likelihood(model, rows, T // 2, mode) - base
        assert row["minus"] == pytest.approx(difference.mean(), abs=2e-5)
        assert row["computation"] == 18  # six times the steps, three passes each
    assert plain_run in lines_of(figures[0].axes[0])
    printed = capsys.readouterr().out
    assert f"{plain_run} never trained latent feedback" in printed
    tables = table_rows(printed)
    place = next(n for n, row in enumerate(tables) if row[0] == "decoded as")
    header, *cells = tables[place:]
    assert header == ["decoded as", "loss", f"minus {plain_run}", "95%", "computation"]
    assert [row[0] for row in cells] == [
        plain_run,
        *(f"{learned}, {mode.capitalize()}" for mode in MODES),
    ]
    assert [row[4] for row in cells] == ["1x", "18x", "18x", "18x"]
    assert "95% is over the windows of one training" in printed
    assert "no plain run" not in printed


def nlls_of(levels: dict[str, float]) -> dict[str, np.ndarray]:
    """By mode, NLLs (3, 4) that are the same everywhere."""
    return {mode: np.full((3, 4), level) for mode, level in levels.items()}


def test_several_trainings_are_paired_by_seed_and_have_students_interval():
    results = []
    for seed, tokens in ((1, 10), (2, 10), (2, 30), (1, 30), (3, 10), (3, 30)):
        about = {"checkpoint": f"run{len(results)}", "seed": seed, "parameters": 7}
        about["begun_from"] = ""
        results.append(about | {"compute_tokens": tokens})
    nlls = [
        nlls_of({"standard": 2.0}),
        nlls_of({"standard": 1.0}),
        nlls_of({"standard": 1.25, "soft": 0.75}),
        nlls_of({"standard": 2.25, "soft": 1.5}),
        nlls_of({"standard": 3.0}),
        nlls_of({"standard": 3.5, "soft": 2.75}),
    ]
    grouped = {"full": [2, 3, 5], "plain": [0, 1, 4]}
    plain, standard, soft = decoding_modes.rows_of(
        grouped, results, nlls, decoding_modes.Settings()
    )
    assert plain["decoded"] == "plain" and plain["nll"] == 2 and "minus" not in plain
    assert soft["decoded"] == "full, Soft" and soft["computation"] == 3
    results[3]["begun_from"] = "out/other"  # whose computation is not in its own
    begun = decoding_modes.rows_of(grouped, results, nlls, decoding_modes.Settings())
    assert [row["computation"] for row in begun] == [1, None, None]
    assert soft["runs"] == ["run2", "run3", "run5"] and soft["interval_over"] == "trainings"
    # By seed: -0.5, -0.25 and -0.25; Student's t of two degrees of freedom is 4.3027.
    mean = -1 / 3
    half = 4.3027 * math.sqrt(((1 / 6) ** 2 + 2 * (1 / 12) ** 2) / 2) / math.sqrt(3)
    assert soft["minus"] == pytest.approx(mean)
    assert soft["interval"] == pytest.approx([mean - half, mean + half], abs=1e-4)
    assert standard["minus"] == pytest.approx((0.25 + 0.25 + 0.5) / 3)
    assert [point["minus"] for point in soft["bins"]] == pytest.approx([mean] * 4)
    assert "own seeds" not in decoding_modes.likelihood_table([plain, standard, soft], "plain")
    grouped["full"] = [2]  # with seed 2 alone, whose plain run has 1.0
    fewer = decoding_modes.rows_of(grouped, results, nlls, decoding_modes.Settings())
    *_, last = decoding_modes.likelihood_table(fewer, "plain").splitlines()
    assert last == "full, Soft is compared with the plain of its own seeds, whose loss is 1.000"


def test_a_plain_run_without_computation_gives_no_multiple():
    results = []
    for tokens in (0, 3_000_000):
        about = {"checkpoint": "x", "begun_from": "", "seed": 1, "parameters": 7}
        results.append(about | {"compute_tokens": tokens})
    nlls = [nlls_of({"standard": 2.0}), nlls_of({"standard": 1.0, "soft": 1.0})]
    rows = decoding_modes.rows_of(
        {"plain": [0], "full": [1]}, results, nlls, decoding_modes.Settings()
    )
    assert [row["computation"] for row in rows] == [None] * 3
    assert "x |" not in decoding_modes.likelihood_table(rows, "plain")


def test_several_trainings_need_a_plain_run_for_each_seed():
    assert decoding_modes.partners([5], [2], [0, 0, 1, 0, 0, 9]) == [2]  # one against one
    assert decoding_modes.partners([0, 1], [2, 3], [7, 8, 8, 7]) == [3, 2]
    with pytest.raises(decoding_modes.UserError, match=r"seeds \[1, 2\].*seeds \[1\]"):
        decoding_modes.partners([0, 1], [2], [1, 2, 1])


def test_runs_of_other_windows_are_refused(corpus, make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding_modes, "measure", None)  # all of it comes before any work
    shorter = make_run(block_size=8, fusion="none", pass_mix=(1.0,), max_iters=1)
    one, other = (make_run(seed=seed, max_iters=1) for seed in (1, 3))
    words = (shorter, one, "--n_windows=2", *FEW)
    place = (f"--data_dir={corpus}", f"--results_dir={tmp_path}/none")
    assert "cannot be compared" in refused(decoding_modes, *words, *place)
    plain = make_run(seed=2, fusion="none", pass_mix=(1.0,), max_iters=1)
    words = (plain, one, other, *FEW)
    assert "name one plain run for each seed" in refused(decoding_modes, *words, *place)
    assert not (tmp_path / "none").exists()


def test_other_tokens_are_refused(learned):
    model, checkpoint = load_model(learned)
    tokens = np.arange(40)
    decoding_modes.same_windows(["a", "b"], [(model, checkpoint, tokens)] * 2)
    for other in (tokens[:-1], tokens + 1):
        runs = [(model, checkpoint, tokens), (model, checkpoint, other)]
        with pytest.raises(decoding_modes.UserError, match="^b and a have different texts"):
            decoding_modes.same_windows(["a", "b"], runs)
    runs = [(model, checkpoint, tokens), (model, checkpoint | {"tokenizer": {}}, tokens)]
    with pytest.raises(decoding_modes.UserError, match="^b and a have different texts"):
        decoding_modes.same_windows(["a", "b"], runs)


def test_long_windows_are_binned(corpus, make_run, tmp_path):
    long_window = make_run(block_size=64, max_iters=3)
    words = (long_window, "--n_windows=3", "--n_prompt=10", *FEW)
    numbers = run_experiment(decoding_modes, corpus, tmp_path, *words)
    modes = numbers["checkpoints"]["run"]["modes"]
    soft = np.array(modes["soft"]["nll_by_position"])  # (55,)
    by_position = soft - modes["standard"]["nll_by_position"]
    sizes = [4] * 7 + [3] * 9  # 55 positions in 16 bins, the larger ones first
    starts = np.cumsum([0, *sizes])[:-1]
    bins = by_decoded(numbers)["run, Soft"]["bins"]
    for point, start, size in zip(bins, starts, sizes, strict=True):
        assert point["minus"] == pytest.approx(by_position[start : start + size].mean(), abs=1e-6)
        assert point["position"] == start + (size + 1) / 2


def test_windows_do_not_overlap(corpus, tiny_run, tmp_path):
    tokens = validation(corpus)
    words = (tiny_run, "--n_windows=100000", *FEW)
    result = run_experiment(decoding_modes, corpus, tmp_path, *words)["checkpoints"]["run"]
    assert result["n_windows"] == (len(tokens) - 1) // T


def test_samples_are_measured(corpus, learned, tmp_path):
    """Greedy: against naive decoding, text searched by str, 4-grams counted in a dict."""
    model, checkpoint = load_model(learned)
    symbols = checkpoint["tokenizer"]["symbols"]
    texts = window_rows(validation(corpus), 9, length=4 + 12)
    words = (learned, "--n_windows=2", "--n_prompt=4", "--n_samples=9", "--max_new_tokens=12")
    greedy = ("--temperature=0", "--stop=1\n")
    result = run_experiment(decoding_modes, corpus, tmp_path, *words, *greedy)
    result = result["checkpoints"]["run"]
    pairs = [(texts[:, 4:], result["held_out_text"])]
    for mode in MODES:
        generated = naive_greedy(model, texts[:, :4], 12, mode)
        pairs.append((generated, result["modes"][mode]["samples"]))
    stopped = []
    for rows, got in pairs:
        lengths = []
        shares = []
        for row in rows.tolist():
            text = "".join(symbols[i] for i in row)
            lengths.append(text.find("1\n") + 2 if "1\n" in text else None)
            seen: dict[str, int] = {}
            for start in range(9):
                gram = text[start : start + 4]
                seen[gram] = seen.get(gram, 0) + 1
            shares.append(sum(times - 1 for times in seen.values()) / 9)
        counted = [length or 12 for length in lengths]
        assert got["lengths"] == counted
        assert got["median_length"] == sorted(counted)[4]
        assert got["never_stopped"] == pytest.approx(lengths.count(None) / 9)
        assert got["repeated_4grams"] == pytest.approx(sum(shares) / 9)
        stopped += [length is not None for length in lengths]
    assert any(stopped) and not all(stopped)


def test_samples_depend_on_the_seed_alone_and_share_it_over_modes(
    corpus, tiny_run, tmp_path, monkeypatch
):
    drawn = []
    generate = GPT.generate

    def watched(self, *args, **kwargs):
        drawn.append([])
        for token, log_prob in generate(self, *args, **kwargs):
            drawn[-1].append(token.tolist())
            yield token, log_prob

    monkeypatch.setattr(GPT, "generate", watched)
    for seed in (1, 1, 2):
        torch.manual_seed(len(drawn))
        words = (tiny_run, "--n_windows=2", f"--seed={seed}", "--n_samples=3")
        run_experiment(decoding_modes, corpus, tmp_path, *words, "--max_new_tokens=20")
    assert drawn[0:3] == drawn[3:6] and drawn[0] != drawn[6]
    assert drawn[0][0] == drawn[1][0]  # Soft's first token is Standard's: same state, same draw


def test_mistakes_are_named(corpus, tiny_run, tmp_path):
    def complaint(*words):
        place = (f"--data_dir={corpus}", f"--results_dir={tmp_path}")
        return refused(decoding_modes, tiny_run, *place, *words)

    assert "at least one checkpoint" in refused(decoding_modes)
    too_long = complaint("--n_prompt=16")
    assert "--n_prompt=16" in too_long and "at most 15" in too_long
    n_tokens = len(validation(corpus))
    assert f"at most {n_tokens - 8} follow" in complaint(f"--max_new_tokens={n_tokens - 7}")
    for word in ("--n_prompt=-1", "--prefill_passes=0", "--n_samples=0", "--max_new_tokens=3"):
        assert word in complaint(word)
    assert "temperature=-1" in complaint("--temperature=-1")
    assert "stop" in complaint("--stop=")
    assert not list(tmp_path.iterdir())


def test_bootstrap_on_hand_data():
    # The sum is binomial(10, 0.1): P(<= 2) = 0.930, P(<= 3) = 0.987.
    one_of_ten = np.array([1.0] + [0.0] * 9)
    columns = np.stack([np.full(10, 0.25), one_of_ten, -one_of_ten], axis=1)
    constant, first, negative = decoding_modes.bootstrap(columns, 1)
    assert constant == [0.25, 0.25]
    assert first == pytest.approx([0, 0.3]) and negative == pytest.approx([-0.3, 0])
    # Means 0, 1/2, 1 with shares 1/4, 1/2, 1/4.
    assert decoding_modes.bootstrap(np.array([[0.0], [1.0]]), 1) == [[0, 1]]
    # Five ones of ten: 0.2%.
    assert decoding_modes.bootstrap(one_of_ten[:, None], 1, np.median) == [[0, 0]]
    values = np.random.default_rng(0).normal(3, 2, (400, 1))
    interval = decoding_modes.bootstrap(values, 1)
    error = 1.96 * values.std() / 20
    normal = [values.mean() - error, values.mean() + error]
    assert interval[0] == pytest.approx(normal, abs=0.1 * error)
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
