"""experiments/play.py: the page's models against PyTorch's, and the page itself, in Chromium.

The browser tests need Playwright for Python and a Chromium of the system's. Without them they are
skipped, except where CI=true: there a missing browser is a failure.
"""

import base64
import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from corpora.cups import MOVES
from experiments import play
from harness.checkpoint import load_checkpoint, load_model, save_checkpoint
from harness.configurator import UserError, convert, read_toml
from harness.tokenizer import CharTokenizer
from model import GPT, FusionKind, GPTConfig, Mode

DOCS = Path(__file__).parents[1] / "docs" / "index.html"
SYMBOLS = "12345rs"
CLOSE = 1e-4  # by how much the page's logits may differ from PyTorch's
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
TWENTY = "srrsrssrrrsrsrrssrrs"  # moves
SHAPE = {"vocab_size": 7, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_hidden": 24}

# --------------------------------------------------------------------------------------------------
# The browser


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("Playwright is missing; pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = [path for path in map(shutil.which, names) if path]
    if not found:
        pytest.skip(f"no browser is installed; looked for {', '.join(names)}")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found[0], args=FLAGS)
        yield chromium
        chromium.close()


def open_page(browser, file: Path, **options):
    """The page, ready, in a context of its own; `page.problems` collects what must not happen."""
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)  # a busy machine is slow
    page = context.new_page()
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.problems.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#checked[data-difference]", state="attached")
    assert page.problems.pop(0) == file.as_uri()  # the one thing that is requested
    return page


@pytest.fixture(scope="module")
def docs(browser):
    """The committed page, which several tests use one after the other."""
    page = open_page(browser, DOCS, viewport={"width": 1400, "height": 900})
    yield page
    assert page.problems == []


@pytest.fixture
def game(docs):
    """The committed page at the beginning of a game: the ball is under cup 3, nobody writes."""
    docs.evaluate("""() => {
      document.activeElement.blur();
      play(false);
      $("write").checked = false;
      let_write(false);
      new_game("3");
    }""")
    return docs


def wait_until(page, condition: str):
    """Waits for a condition; Playwright's own way needs eval, which the page forbids."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{condition} did not become true")


# --------------------------------------------------------------------------------------------------
# PyTorch's side


def random_model(seed: int = 1, **shape) -> GPT:
    """Random weights everywhere, in gains and in what begins at zero, too.

    With larger ones the recurrence is chaotic: PyTorch's float32 then differs from its float64.
    """
    model = GPT(GPTConfig(**(SHAPE | shape))).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else 0.24 * noise)
    return model


def unpacked(packed: dict) -> GPT:
    """The model that a page holds, in PyTorch."""
    model = GPT(GPTConfig(**packed["config"])).eval()
    data = torch.frombuffer(bytearray(base64.b64decode(packed["data"])), dtype=torch.float32)
    sizes = [torch.Size(shape).numel() for _, shape in packed["weights"]]
    parts = data.split(sizes)
    weights = {}
    for (name, shape), part in zip(packed["weights"], parts, strict=True):
        weights[name] = part.view(shape)
    model.load_state_dict(weights)
    return model


def in_page(file: Path, name: str) -> dict:
    """What stands in the page's script element of this id."""
    element = rf'<script type="application/json" id="{name}">(.*?)</script>'
    return json.loads(re.search(element, file.read_text())[1])


@pytest.fixture(scope="module")
def trained() -> dict[str, GPT]:
    """The committed page's own models, plain and full."""
    return {name: unpacked(packed) for name, packed in in_page(DOCS, "models").items()}


@torch.no_grad()
def decoded(model: GPT, tokens: list[int], mode: Mode, n_prompt: int = 1, **options) -> Tensor:
    """Logits (V,) after the last token, fed one by one behind the prompt."""
    idx = torch.tensor([tokens])
    cache, h = model.prefill(idx[:, :n_prompt], mode, **options)
    for t in range(n_prompt, len(tokens)):
        h = model.decode_step(idx[:, t : t + 1], h, cache, mode)
    return model.head(h[0, 0])


def belief(model: GPT, text: str, mode: Mode) -> list[float]:
    """The probabilities of the five looks after a text."""
    logits = decoded(model, [SYMBOLS.index(symbol) for symbol in text], mode)
    return logits[:5].softmax(-1).tolist()


def likeliest(values: list[float]) -> int:
    return values.index(max(values))


def cups(text: str) -> list[int]:
    """The ball's cup 1..5 after each move of a text that begins with a look."""
    cup = text[0]
    places = []
    for symbol in text[1:]:
        cup = MOVES[symbol].get(cup)
        places.append(int(cup))
    return places


# --------------------------------------------------------------------------------------------------
# It is the same model

LOGITS = "([packed, ...words]) => Array.from(new GPT(packed).logits_after(...words))"
TOKENS = [(5 * place + place // 3) % 7 for place in range(23)]  # block_size is 8: it slides twice
OTHER_SHAPES = [
    {"n_head": 4, "n_kv_head": 2},
    {"n_head": 4, "n_kv_head": 1, "head_dim": 6},
    {"qk_norm": False},
    {"depth_scale": False, "input_norm": False},
    {"window": 3},
    {"window": 2, "window_every": 2, "n_layer": 4},
    {"rope_base": 7.0, "eps": 0.1},
    {"n_hidden": 0},
]


@pytest.mark.parametrize("kind", get_args(FusionKind))
def test_logits_equal_pytorch_for_every_fusion_and_mode(docs, kind):
    model = random_model(fusion=kind, n_head=4, n_kv_head=2)
    if kind not in play.FUSIONS:  # one that was added to model.py; the page says that it cannot
        with pytest.raises(UserError, match=f"fusion={kind}"):
            play.packed(model, CharTokenizer(SYMBOLS).spec, "out/new")
        return
    packed = play.packed(model, CharTokenizer(SYMBOLS).spec, "out/new")
    modes = get_args(Mode) if kind != "none" else ("standard",)
    last = {}
    for mode in modes:
        for n_prompt in (1, 5, 12):
            logits = docs.evaluate(LOGITS, [packed, TOKENS, mode, n_prompt])
            expected = decoded(model, TOKENS, mode, n_prompt)
            assert torch.tensor(logits).sub(expected).abs().max() < CLOSE
        last[mode] = expected
    for mode in modes[1:]:
        assert (last[mode] - last["standard"]).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=str)
def test_logits_equal_pytorch_for_every_shape(docs, shape):
    model = random_model(**shape)
    packed = play.packed(model, CharTokenizer(SYMBOLS).spec, "out/new")
    for mode in get_args(Mode):
        logits = docs.evaluate(LOGITS, [packed, TOKENS, mode, 6, 3])
        options = {"prefill_passes": 3} if mode == "fused" else {}
        expected = decoded(model, TOKENS, mode, 6, **options)
        assert torch.tensor(logits).sub(expected).abs().max() < CLOSE
    if "n_kv_head" not in shape and "n_hidden" not in shape:  # without the setting: other numbers
        other = random_model(n_layer=shape.get("n_layer", 2))
        other.load_state_dict(model.state_dict(), strict=False)
        assert (decoded(other, TOKENS, "fused", 6, **options) - expected).abs().max() > CLOSE


def test_passes_and_losses_equal_pytorch(docs):
    model = random_model(block_size=12)
    packed = play.packed(model, CharTokenizer(SYMBOLS).spec, "out/new")
    script = """([packed, idx]) => {
      const model = new GPT(packed);
      const states = model.passes(idx, 4);
      const losses = states.map((h) => idx.slice(1).map((token, t) => model.nll(h[t], token)));
      return [states.map((h) => h.map((h_t) => Array.from(h_t))), losses];
    }"""
    states, losses = docs.evaluate(script, [packed, TOKENS[:10]])
    idx = torch.tensor([TOKENS[:10]])
    with torch.no_grad():
        expected = model.passes(idx, 4)
        nll = [model.nll(h[:, :-1], idx[:, 1:])[0] for h in expected]
    assert torch.tensor(states).sub(torch.cat(expected)).abs().max() < CLOSE
    assert torch.tensor(losses).sub(torch.stack(nll)).abs().max() < CLOSE


def test_the_page_checks_itself(docs):
    assert float(docs.get_attribute("#checked", "data-difference")) < CLOSE
    assert "equal PyTorch" in docs.text_content("#checked")
    docs.evaluate("models.full.check.logits[0] += 0.01; check_models()")
    assert "WARNING" in docs.text_content("#checked")
    docs.evaluate("models.full.check.logits[0] -= 0.01; check_models()")
    assert "equal PyTorch" in docs.text_content("#checked")


def test_what_the_check_holds_is_what_decoding_gives():
    packed = play.packed(random_model(), CharTokenizer(SYMBOLS).spec, "out/new")
    tokens, mode, logits = (packed["check"][name] for name in ("tokens", "mode", "logits"))
    assert mode == "soft" and len(tokens) > SHAPE["block_size"] and len(set(tokens)) > 3
    assert logits == pytest.approx(decoded(random_model(), tokens, "soft").tolist(), abs=1e-6)


# --------------------------------------------------------------------------------------------------
# The shell game


def bars(page, player: str) -> list[float]:
    script = "all => all.map(bar => Number(bar.dataset.belief))"
    return page.eval_on_selector_all(f"#{player} .bar", script)


def classes(page, selector: str) -> list[str]:
    return page.eval_on_selector_all(selector, "all => all.map(one => one.className)")


def play_moves(page, moves: str):
    """Moves by the page's own function, in one call; another test presses keys and buttons."""
    page.evaluate("(moves) => { for (const move of moves) make(move); }", moves)


def write_letters(page, n: int):
    page.evaluate("(n) => { for (let i = 0; i < n; i++) $('text-step').click(); }", n)


def text_of(page, selector: str) -> str:
    return page.text_content(selector).strip()


def test_the_bars_after_twenty_moves_are_pytorchs(game, trained):
    for number, move in enumerate(TWENTY):
        if number % 2:
            game.keyboard.press(move)
        else:
            game.click({"s": "#swap", "r": "#rotate"}[move])
    truth = cups("3" + TWENTY)
    assert text_of(game, "#moves") == "20"
    assert "fresh" not in game.get_attribute("#soft", "class")
    modes = {"plain": "standard", "standard": "standard", "soft": "soft"}
    for player, mode in modes.items():
        name = "plain" if player == "plain" else "full"
        expected = [belief(trained[name], "3" + TWENTY[:n], mode) for n in range(1, 21)]
        shown = bars(game, player)
        assert shown == pytest.approx(expected[-1], abs=CLOSE)
        percents = game.locator(f"#{player} .percent").all_text_contents()
        assert percents == [f"{100 * value:.0f}%" for value in shown]
        right = [likeliest(values) + 1 == cup for values, cup in zip(expected, truth, strict=True)]
        verdict = text_of(game, f"#{player} .verdict")
        if all(right):
            assert verdict == "\u2713 Never lost it; 20 of 20 right"
        else:
            first = right.index(False) + 1
            assert verdict == f"\u2717 Lost it at move {first}; {sum(right)} of 20 right"
        tally = classes(game, f"#{player} .tally i")
        assert tally == ["yes" if one else "no" for one in right]
        marked = classes(game, f"#{player} .bar")
        assert [place + 1 for place, name in enumerate(marked) if "true" in name] == [truth[-1]]
        assert [place for place, name in enumerate(marked) if "guess" in name] == [likeliest(shown)]
        label = game.get_attribute(f"#{player} .bars", "aria-label")
        assert f"cup 1 {100 * shown[0]:.0f}%" in label and f"under cup {truth[-1]}." in label
        assert text_of(game, f"#{player} .tokens") == "20 letters, 20 moves"
        assert text_of(game, f"#{player} .heard") == "3" + TWENTY
    assert "Never lost" in text_of(game, "#soft .verdict")  # what the page is there to show


def test_the_cups_move_with_the_ball(game):
    places = "Array.from($('cup-row').children, g => new DOMMatrix(g.style.transform).e)"
    assert game.evaluate(places) == [50, 150, 250, 350, 450]
    assert "under cup 3, in sight" in game.text_content("#cups-label")
    assert game.is_disabled("#look")
    game.keyboard.press("s")
    assert game.evaluate(places) == [150, 50, 250, 350, 450]
    game.keyboard.press("r")
    assert game.evaluate(places) == [250, 150, 350, 450, 50]
    assert "under cup 4, hidden" in game.text_content("#cups-label")
    assert not game.is_visible("#ball") and game.is_visible("#ghost")
    game.keyboard.press("L")
    assert game.is_visible("#ball") and not game.is_visible("#ghost")
    assert text_of(game, "#moves") == "0" and text_of(game, "#soft .heard") == "3sr4"
    assert text_of(game, "#soft .verdict") == "\u2713 Has just seen it, no need to guess"
    assert "fresh" in game.get_attribute("#soft", "class")
    game.keyboard.press("l")  # a second look tells nothing
    assert text_of(game, "#soft .heard") == "3sr4"


def test_let_it_write(game, trained):
    play_moves(game, TWENTY[:10])
    silent = bars(game, "plain")
    feedback = bars(game, "soft")
    game.keyboard.press("w")  # in the middle of a game, which it hears again
    play_moves(game, TWENTY[10:])
    read = "3"
    written = []
    for move in TWENTY:
        expected = belief(trained["plain"], read + move, "standard")
        written.append(str(likeliest(expected) + 1))
        read += move + written[-1]
    assert bars(game, "plain") == pytest.approx(expected, abs=CLOSE)
    assert text_of(game, "#plain .tokens") == "40 letters, 20 moves"
    assert text_of(game, "#soft .tokens") == "20 letters, 20 moves"
    assert text_of(game, "#plain .heard") == read
    assert game.locator("#plain .heard b").all_text_contents() == written
    assert [int(cup) for cup in written] == cups("3" + TWENTY)  # it follows the ball, too
    assert "20 moves took it 40 letters, and Soft 20" in text_of(game, "#comment")
    game.keyboard.press("l")  # the look takes the place of its last guess
    assert text_of(game, "#plain .heard") == read[:-1] + read[-1]
    seen = belief(trained["plain"], read[:-1] + str(cups("3" + TWENTY)[-1]), "standard")
    assert bars(game, "plain") == pytest.approx(seen, abs=CLOSE)
    game.click("#write")
    game.keyboard.press("n")
    assert not game.is_checked("#write")
    game.evaluate("new_game('3')")
    play_moves(game, TWENTY[:10])
    assert bars(game, "plain") == pytest.approx(silent, abs=1e-6)
    assert bars(game, "soft") == pytest.approx(feedback, abs=1e-6)


def test_play_pause_and_speed(game):
    game.fill("#speed", "10")
    game.keyboard.press("Space")
    assert game.get_attribute("#play", "aria-pressed") == "true"
    assert text_of(game, "#play span") == "Pause"
    wait_until(game, "Number($('moves').textContent) >= 12")
    game.keyboard.press("Space")
    moves = text_of(game, "#moves")
    said = text_of(game, "#spoken")
    assert game.get_attribute("#play", "aria-pressed") == "false"
    game.wait_for_timeout(120)
    assert text_of(game, "#moves") == moves
    assert said.startswith("The ball is under cup") and "Soft points at cup" in said
    slow, fast = game.evaluate("[0, 10].map(v => { $('speed').value = v; return interval(); })")
    assert slow > 1000 and fast < 50
    game.click("#play")
    game.click("#new")
    assert game.get_attribute("#play", "aria-pressed") == "false"
    assert text_of(game, "#moves") == "0"


def test_keys_leave_fields_and_shortcuts_alone(game):
    before = game.input_value("#passes-text")
    game.fill("#passes-text", "3s")
    game.keyboard.press("r")
    assert game.input_value("#passes-text") == "3sr"
    game.fill("#passes-text", before)
    game.evaluate("document.activeElement.blur()")
    game.evaluate("""document.body.dispatchEvent(
        new KeyboardEvent("keydown", {key: "s", ctrlKey: true, bubbles: true}))""")
    assert text_of(game, "#moves") == "0"
    game.focus("#swap")
    game.keyboard.press("Space")  # presses the focused button, and does not start the play
    assert text_of(game, "#moves") == "1"
    assert game.get_attribute("#play", "aria-pressed") == "false"


# --------------------------------------------------------------------------------------------------
# The passes


def numbers(page, selector: str, name: str) -> list[float]:
    script = f"all => all.map(one => Number(one.dataset.{name}))"
    return page.eval_on_selector_all(f"#grid {selector}", script)


def test_the_grid_and_the_losses_are_pytorchs(game, trained):
    text = game.input_value("#passes-text")
    assert len(text) == 24
    cup = text[0]
    for symbol in text[1:]:
        cup = MOVES[symbol][cup] if symbol in MOVES else cup
        assert symbol in MOVES or symbol == cup  # every look is true
    idx = torch.tensor([[SYMBOLS.index(symbol) for symbol in text]])
    with torch.no_grad():
        states = trained["full"].passes(idx, 24)
        losses = [trained["full"].nll(h[:, :-1], idx[:, 1:])[0].tolist() for h in states]
    changes = torch.tensor(numbers(game, ".cell", "change")).view(24, 24)  # position, pass
    for k in (2, 3, 24):
        change = (states[k - 1] - states[k - 2])[0].norm(dim=-1) / states[k - 1][0].norm(dim=-1)
        assert changes[:, k - 1].tolist() == pytest.approx(change.tolist(), abs=CLOSE)
    for k in range(2, 25):  # exactness travels one position per pass
        assert changes[: k - 1, k - 1].abs().max() == 0
    assert changes[1, 1] > 0 and changes[2, 2] > 0
    for k in (1, 5, 24):
        game.fill("#k", str(k))
        assert numbers(game, ".loss", "loss") == pytest.approx(losses[k - 1], abs=CLOSE)
        assert text_of(game, "#k-value") == f"{k} of 24"
    looks = [t for t in range(23) if text[t + 1] not in MOVES]
    mean = sum(losses[4][t] for t in looks) / len(looks)
    game.fill("#k", "5")
    said = text_of(game, "#passes-says")
    assert said.startswith("After 5 passes the first 5 letters are exact") and f"{mean:.2f}" in said
    assert game.locator("#grid .later").count() == 24 * 19
    game.focus("#k")
    game.keyboard.press("ArrowRight")
    assert text_of(game, "#k-value") == "6 of 24"


def test_a_text_of_ones_own(game):
    before = game.input_value("#passes-text")
    game.fill("#passes-text", "3sx")
    assert "not x" in text_of(game, "#passes-error")
    game.fill("#passes-text", "3")
    assert "at least two" in text_of(game, "#passes-error")
    assert game.locator("#grid .cell").count() == 24 * 24  # the grid stays
    game.fill("#passes-text", "3sr")
    assert text_of(game, "#passes-error") == "" and game.locator("#grid .cell").count() == 9
    for button in ("#swap", "#swap", "#rotate"):
        game.click(button)
    game.click("#passes-game")
    assert game.input_value("#passes-text") == "3ssr" and game.locator("#grid .cell").count() == 16
    game.fill("#passes-text", before)


# --------------------------------------------------------------------------------------------------
# The text model


@pytest.fixture(scope="module")
def runs(make_run, tiny_run, plain_run, tmp_path_factory) -> dict[str, str]:
    """Checkpoints of the game, plain and full, and of a text; random weights make them differ."""
    folders = {"text": tiny_run, "plain text": plain_run}
    for name, source in (("plain", plain_run), ("full", tiny_run)):
        checkpoint = load_checkpoint(source)
        config = checkpoint["model_config"] | {"vocab_size": 7}
        checkpoint["model_config"] = config
        checkpoint["model"] = random_model(**config).state_dict()
        checkpoint["tokenizer"] = CharTokenizer(SYMBOLS).spec
        folder = tmp_path_factory.mktemp("play") / name
        folder.mkdir()
        save_checkpoint(folder, checkpoint)
        folders[name] = str(folder)
    return folders


@pytest.fixture(scope="module")
def built(runs, tmp_path_factory) -> Path:
    """A page with a text model."""
    file = tmp_path_factory.mktemp("page") / "new" / "play.html"
    words = [runs["plain"], runs["full"], f"--text={runs['text']}", f"--out={file}"]
    assert play.main(words) == 0
    return file


@pytest.fixture(scope="module")
def writing(browser, built):
    page = open_page(browser, built)
    yield page
    assert page.problems == []


def test_the_text_model_writes_what_pytorch_writes(writing, runs):
    model, checkpoint = load_model(runs["text"])
    symbols = checkpoint["tokenizer"]["symbols"]
    writing.fill("#prompt", "12+30")
    writing.fill("#temperature", "0")
    idx = torch.tensor([[symbols.index(symbol) for symbol in "12+30"]])
    for mode in get_args(Mode):
        _, h = model.prefill(idx, mode)
        best = model.head(h[0, 0]).softmax(-1).topk(5)
        shown = writing.eval_on_selector_all(
            f"#column-{mode} .next div",
            "all => all.map(row => [row.dataset.symbol, Number(row.dataset.p)])",
        )
        assert [symbol for symbol, _ in shown] == [symbols[token] for token in best.indices]
        assert [p for _, p in shown] == pytest.approx(best.values.tolist(), abs=CLOSE)
    write_letters(writing, 30)  # block_size is 16: the caches slide
    texts = {}
    for mode in get_args(Mode):
        tokens = [int(token) for token, _ in model.generate(idx, 30, mode)]
        texts[mode] = "".join(symbols[token] for token in tokens)
        assert writing.text_content(f"#column-{mode} .out") == "12+30" + texts[mode]
    for mode in ("soft", "fused"):
        pairs = zip(texts[mode], texts["standard"], strict=True)
        differs = [one != other for one, other in pairs]
        same = differs.index(True) if any(differs) else 30
        parted = writing.text_content(f"#column-{mode} .parted")
        assert parted == texts[mode][same:]
        assert str(same) in text_of(writing, f"#column-{mode} .parts")


def written(page, seed: int) -> list[str]:
    page.fill("#seed", str(seed))
    write_letters(page, 12)
    return [page.text_content(f"#column-{mode} .out") for mode in get_args(Mode)]


def test_temperature_seed_and_buttons_of_the_text_model(writing):
    writing.fill("#prompt", "12")
    writing.fill("#temperature", "1")
    assert text_of(writing, "#temperature-value") == "1.0"
    first = written(writing, 1)
    assert written(writing, 2) != first
    assert written(writing, 1) == first
    writing.click("#text-again")
    assert writing.text_content("#column-soft .out") == "12"
    writing.click("#text-play")
    wait_until(writing, "document.querySelector('#column-soft .out').textContent.length > 5")
    writing.click("#text-play")
    assert text_of(writing, "#text-play") == "Write"
    writing.fill("#prompt", "1x")
    assert "never seen x" in text_of(writing, "#text-error")
    assert writing.is_disabled("#text-step")
    writing.fill("#prompt", "")
    assert text_of(writing, "#text-error") == "" and not writing.is_disabled("#text-step")


def test_sampling_in_the_page(writing):
    counts = writing.evaluate("""() => {
      const random = random_numbers(3);
      const counts = [0, 0, 0];
      const logits = Float32Array.of(0, Math.log(2), 0);
      for (let i = 0; i < 20000; i++) counts[pick(logits, 0.5, random())]++;
      return counts.map((count) => count / 20000);
    }""")
    assert counts == pytest.approx([1 / 6, 4 / 6, 1 / 6], abs=0.012)  # 2 ** (1 / 0.5) = 4 times
    assert writing.evaluate("pick(Float32Array.of(0, 1, 1), 0, 0.99)") == 1


def test_without_a_text_model_there_is_no_third_part(docs):
    assert not docs.is_visible("#text")


# --------------------------------------------------------------------------------------------------
# For everyone


@pytest.mark.parametrize("width, scheme", [(380, "dark"), (1400, "light")])
def test_it_fits_and_has_two_colour_schemes(writing, width, scheme):
    writing.set_viewport_size({"width": width, "height": 800})
    writing.emulate_media(color_scheme=scheme)
    play_moves(writing, TWENTY)
    assert writing.evaluate("document.documentElement.scrollWidth") == width
    overflowing = writing.evaluate("""() => {
      const all = Array.from(document.querySelectorAll("button, input, .card, svg"));
      return all.filter((one) => one.getBoundingClientRect().right > innerWidth).length;
    }""")
    assert overflowing == 0
    columns = writing.evaluate("getComputedStyle($('players')).gridTemplateColumns.split(' ')")
    assert len(columns) == (1 if width < 500 else 3)
    colors = writing.evaluate("""() => {
      const style = getComputedStyle(document.body);
      return [style.backgroundColor, style.color];
    }""")
    paper, ink = (sum(map(int, re.findall(r"\d+", color))) for color in colors)
    assert (paper > ink) == (scheme == "light")


def test_everything_has_a_name_for_screen_readers(writing):
    nameless = writing.evaluate("""() => {
      const all = document.querySelectorAll(
        "button, input, textarea, [role=img], [role=region], article, section");
      const name = (one) => one.getAttribute("aria-label") || one.textContent.trim() ||
        Array.from(one.labels || [], (label) => label.textContent.trim()).join("") ||
        (one.getAttribute("aria-labelledby") && $(one.getAttribute("aria-labelledby")).textContent);
      return Array.from(all).filter((one) => !name(one)).map((one) => one.outerHTML);
    }""")
    assert nameless == []
    assert writing.get_attribute("html", "lang") == "en"
    assert writing.get_attribute("#spoken", "aria-live") == "polite"


@pytest.mark.parametrize("wish, moving", [("reduce", False), ("no-preference", True)])
def test_reduced_motion_is_respected(game, wish, moving):
    game.emulate_media(reduced_motion=wish)
    game.evaluate("document.getAnimations().forEach((animation) => animation.cancel())")
    assert game.evaluate("make('r'); document.getAnimations().length > 0") == moving


# Counts what the page does before its first answer: letters of models that it takes apart, and
# exponentials, of which every position of a model has one per hidden unit.
COUNT = """(() => {
  const { exp } = Math;
  const { parse } = JSON;
  window.work = { letters: 0, exponentials: 0 };
  const answered = () => document.body && document.body.dataset.ready;
  Math.exp = (z) => {
    if (!answered()) work.exponentials += 1;
    return exp(z);
  };
  JSON.parse = (text) => {
    if (!answered()) work.letters += text.length;
    return parse(text);
  };
})()"""


def test_the_first_answer_needs_little_work(browser):
    """It waits for the models of the game alone, and for the one letter that three players read."""
    context = browser.new_context()
    context.add_init_script(COUNT)
    page = context.new_page()
    page.goto(DOCS.as_uri())
    page.wait_for_selector("#checked[data-difference]", state="attached")
    work = page.evaluate("work")
    positions = page.evaluate("""() => {
      const { weight, config } = models.full;  // the plain model has the same blocks
      const n_hidden = weight["blocks.0.mlp.gate"].length / config.n_embd;
      return 3 * config.n_layer * n_hidden;
    }""")
    assert work["letters"] == len(page.text_content("#models"))
    assert positions <= work["exponentials"] < 1.1 * positions  # the rest: their softmax
    context.close()


def test_sizes():
    assert DOCS.stat().st_size < 2e6
    preset = read_toml("config/demo.toml")
    shape = {name: preset[name] for name in preset if name in GPTConfig.__dataclass_fields__}
    text = GPT(GPTConfig(vocab_size=97, **shape))
    spec = CharTokenizer("".join(map(chr, range(32, 129)))).spec
    models = in_page(DOCS, "models")
    template = play.TEMPLATE.read_text()
    page = play.fill(template, models, play.packed(text, spec, "out/demo"), "<p>Built</p>")
    assert len(page.encode()) < 6e6


# --------------------------------------------------------------------------------------------------
# What Python does


def test_the_committed_page_is_built_from_this_template():
    page = DOCS.read_text()
    now = play.digest(play.TEMPLATE.read_text())
    assert f'<code id="template-sha256">{now}</code>' in page, (
        "experiments/play.html has changed since docs/index.html was built; build it again with "
        "the last command in its footer"
    )
    foot = page[page.index("<footer>") : page.index("</footer>")]
    assert re.search(r"Built on \d{4}-\d\d-\d\d from commit <code>[0-9a-f]{7,}", foot)
    assert re.search(r"training seed \d+", foot)
    assert "python train.py" in foot and "--out=docs/index.html" in foot


def test_a_page_loads_nothing_and_holds_the_checkpoints(built, runs):
    page = built.read_text(encoding="ascii")
    assert "__MODELS__" not in page and "__BUILT__" not in page and "__TEXT__" not in page
    assert not re.search(r'(src|href)="(?!https://arxiv.org|data:)', page)
    assert "default-src 'none'" in page
    for name, packed in in_page(built, "models").items():
        weights, _ = load_model(runs[name])
        for key, weight in unpacked(packed).state_dict().items():
            assert torch.equal(weight, weights.state_dict()[key])
    model, checkpoint = load_model(runs["text"])
    text = in_page(built, "text-model")
    assert text["symbols"] == checkpoint["tokenizer"]["symbols"]
    assert torch.equal(unpacked(text).embedding.weight, model.embedding.weight)


def test_the_footers_command_trains_the_same_run(runs):
    checkpoint = load_checkpoint(runs["text"])
    words = play.training_command(checkpoint, "out/new").split()
    assert words[:2] == ["python", "train.py"] and words[-1] == "--out_dir=out/new"
    given = dict(word.removeprefix("--").split("=") for word in words[2:-1])
    assert given["dataset"] == "tiny" and given["n_embd"] == "32" and "device" not in given
    kinds = {"max_iters": int, "learning_rate": float, "pass_mix": tuple[float, ...]}
    for name in kinds.keys() & given.keys():
        stored = checkpoint["train_config"][name]
        stored = tuple(stored) if isinstance(stored, list) else stored
        assert convert(name, given[name], kinds[name]) == stored


def test_a_symbol_cannot_end_the_script():
    packed = play.packed(random_model(vocab_size=3), {"kind": "char", "symbols": "/<>"}, "out/new")
    page = play.fill("__BUILT__ __MODELS__ __TEXT__", {"full": packed}, packed, "built")
    assert "<" not in page and page.startswith("built ")
    models, _ = json.JSONDecoder().raw_decode(page.removeprefix("built "))
    assert models["full"]["symbols"] == "/<>"


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        play.main(list(words))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_mistakes_are_named(runs, tmp_path):
    out = f"--out={tmp_path}/none.html"
    plain, full, text, plain_text = (runs[name] for name in ("plain", "full", "text", "plain text"))
    assert "name two checkpoints, the plain one first" in refused(out)
    assert "got 1" in refused(plain, out)
    wrong_order = refused(full, plain, out)
    assert wrong_order.startswith(f"{full} is not a plain model") and play.USAGE in wrong_order
    assert "never trained latent feedback" in refused(plain, plain, out)
    other = refused(plain, text, out)
    assert other.startswith(f"{text} was not trained on the shell game") and "--text" in other
    assert "never trained latent feedback" in refused(plain, full, f"--text={plain_text}", out)
    assert "no checkpoint at" in refused(plain, f"{tmp_path}/nothing", out)
    assert not Path(tmp_path, "none.html").exists()
    Path(tmp_path, "file").write_text("")
    assert "--out=" in refused(plain, full, f"--out={tmp_path}/file/page.html")


def unpackable(model: GPT, tokenizer: dict | None = None) -> str:
    with pytest.raises(UserError) as error:
        play.packed(model, tokenizer or CharTokenizer(SYMBOLS).spec, "out/odd")
    assert str(error.value).startswith("out/odd") and "\n" not in str(error.value)
    return str(error.value)


def test_models_that_the_page_cannot_run(monkeypatch):
    assert "--tokenizer=char" in unpackable(random_model(), {"kind": "gpt2"})
    biased = random_model()
    biased.blocks[0].mlp.up.bias = torch.nn.Parameter(torch.zeros(24))
    assert "blocks.0.mlp.up.bias" in unpackable(biased)
    monkeypatch.setattr(play, "FUSIONS", ("add", "none"))
    assert "fusion=gated" in unpackable(random_model())
    monkeypatch.undo()
    monkeypatch.setattr(play, "SETTINGS", play.SETTINGS - {"rope_base"})
    assert "rope_base=7.0" in unpackable(random_model(rope_base=7.0))
    play.packed(random_model(), CharTokenizer(SYMBOLS).spec, "out/even")  # the default harms nobody
    monkeypatch.setattr(play, "MAX_PARAMETERS", 100)
    assert "too many for a page" in unpackable(random_model())
