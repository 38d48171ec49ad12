"""One HTML file in which trained models run: the shell game, the passes, and a text model.

    python -m experiments.play out/cups_plain out/cups                     -> out/results/play.html
    python -m experiments.play out/cups_plain out/cups --text=out/demo

The first checkpoint is a plain model of the shell game, the second one trained on latent feedback.
The page opens from disk in any browser of today: weights as base64 float32, the forward pass of
model.py told a second time in plain JavaScript, no library, and no network request.

The page is the template experiments/play.html with two places filled: the models, and the footer
that says how they were made. The template's sha256 stands in the footer, so that a page which was
built from an older template can be told.
"""

import base64
import dataclasses
import datetime
import hashlib
import html
import json
import random
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from experiments.report import commit, need_feedback, write
from experiments.state_tracking import need_games
from harness.checkpoint import flag_value, load_model, without_feedback
from harness.configurator import UserError, key, parse, run, setting
from model import GPT, GPTConfig, greedy
from train import TrainConfig

TEMPLATE = Path(__file__).with_name("play.html")
MODELS = "__MODELS__"  # where the template takes the two models of the game, as JSON
TEXT = "__TEXT__"  # where it takes the text model, as JSON, or null; last, since it is large
BUILT = "__BUILT__"  # where it takes the footer, as HTML
USAGE = "python -m experiments.play out/cups_plain out/cups"

# What the page's forward pass knows. Anything else is refused, since it would be computed wrongly.
FUSIONS = ("gated", "add", "concat", "residual", "gated_residual", "none")
SETTINGS = {
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head", "head_dim", "n_hidden",
    "dropout", "fusion", "window", "window_every", "rope_base", "qk_norm", "input_norm",
    "depth_scale", "eps",
}  # fmt: skip
MAX_PARAMETERS = 20_000_000  # a page of about 107 MB; one token then takes tens of milliseconds
N_CHECKED = 3  # tokens beyond block_size in the page's check of itself: the cache slides


@dataclass(frozen=True)
class Settings:
    text: str = setting("", "a text model with feedback, for the page's third part", path=True)
    out: str = setting("out/results/play.html", "the file to write", path=True)


def weight_names(config: GPTConfig) -> set[str]:
    """The weights that the page's forward pass reads, for a model of this shape."""
    names = {"embedding.weight", "output_norm.weight"}
    if config.input_norm:
        names.add("input_norm.weight")
    parts = ["attn_norm", "attn.q", "attn.k", "attn.v", "attn.out"]
    parts += ["mlp_norm", "mlp.gate", "mlp.up", "mlp.down"]
    if config.qk_norm:
        parts += ["attn.q_norm", "attn.k_norm"]
    for layer in range(config.n_layer):
        names.update(f"blocks.{layer}.{part}.weight" for part in parts)
    if config.fusion == "concat":
        names.add("fusion.W_R.weight")
    elif config.fusion != "none":
        names.add("fusion.W_H.weight")
    if config.fusion in ("gated", "add", "gated_residual"):
        names.add("fusion.W_G.weight")
    return names


def require_runnable(model: GPT, tokenizer: dict, path: str) -> None:
    """UserError, naming the checkpoint, for a model that the page's forward pass cannot run."""
    config = model.config
    if tokenizer["kind"] != "char":
        raise UserError(
            f"{path} has the tokenizer {tokenizer['kind']}, and the page runs characters only; "
            "prepare its text with --tokenizer=char and train again"
        )
    if config.fusion not in FUSIONS:
        raise UserError(
            f"{path} has fusion={config.fusion}, which the page does not know; add its formula to "
            "Fusion in experiments/play.html, and its name to FUSIONS in experiments/play.py"
        )
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in SETTINGS and value != field.default:
            raise UserError(
                f"{path} has {field.name}={value}, which the page does not know; train one with "
                f"{field.name}={field.default}, or add it to experiments/play.html"
            )
    weights = model.state_dict()
    odd = sorted(weights.keys() ^ weight_names(config))
    if odd:
        raise UserError(
            f"{path}: the page does not know, or misses, the weights {', '.join(odd)}; change "
            "experiments/play.html as model.py was changed"
        )
    n_parameters = sum(weight.numel() for weight in weights.values())
    if n_parameters > MAX_PARAMETERS:
        raise UserError(
            f"{path} has {n_parameters:,} parameters, too many for a page (at most "
            f"{MAX_PARAMETERS:,}); give a smaller model"
        )


@torch.no_grad()
def logits_after(model: GPT, tokens: list[int], mode: str) -> Tensor:
    """Logits (V,) after the last of the tokens; the first is the prompt, the others are decoded."""
    rest = iter(tokens[1:])
    last = torch.empty(0)

    def pick(logits: Tensor) -> Tensor:
        nonlocal last
        last = logits[0]  # (V,)
        forced = next(rest, None)
        return greedy(logits) if forced is None else torch.tensor([forced])

    for _ in model.generate(torch.tensor([tokens[:1]]), len(tokens), mode, pick):
        pass
    return last


def packed(model: GPT, tokenizer: dict, path: str) -> dict:
    """A model as the page takes it: config, symbols, base64 float32 weights, and a check.

    The check is a few logits by PyTorch, which the page compares with its own. path is for
    messages. UserError for a model that the page cannot run.
    """
    require_runnable(model, tokenizer, path)
    model = model.float().cpu().eval()
    mode = "standard" if model.config.fusion == "none" else "soft"
    n_tokens = model.config.block_size + N_CHECKED
    draw = random.Random(1)
    tokens = [draw.randrange(model.config.vocab_size) for _ in range(n_tokens)]
    shapes = []
    parts = []
    for name, weight in model.state_dict().items():
        shapes.append([name, list(weight.shape)])
        parts.append(weight.numpy().astype("<f4").tobytes())
    return {
        "config": dataclasses.asdict(model.config),
        "symbols": tokenizer["symbols"],
        "weights": shapes,
        "data": base64.b64encode(b"".join(parts)).decode(),
        "check": {
            "tokens": tokens,
            "mode": mode,
            "logits": logits_after(model, tokens, mode).tolist(),
        },
    }


def training_command(checkpoint: dict, out_dir: str) -> str:
    """The command that trains such a checkpoint: every setting that is not the default's."""
    words = []
    for cls, part in ((TrainConfig, "train_config"), (GPTConfig, "model_config")):
        for field in dataclasses.fields(cls):
            value = checkpoint[part].get(field.name, field.default)
            if isinstance(value, list):
                value = tuple(value)
            left_out = field.name in ("out_dir", "data_dir", "device", "resume", "overwrite")
            if left_out or not field.metadata["flag"] or value == field.default:
                continue
            words.append(shlex.quote(f"--{key(field.name)}={flag_value(value)}"))
    return " ".join(["python train.py", *words, f"--out_dir={shlex.quote(out_dir)}"])


def footer(checkpoints: dict[str, dict], command: str, template: str) -> str:
    """HTML that says how the page was made; checkpoints by their path."""
    lines = []
    for path, checkpoint in checkpoints.items():
        dataset = checkpoint["train_config"]["dataset"]
        lines.append(f"python prepare.py {shlex.quote(dataset)}")
        lines.append(training_command(checkpoint, path))
    lines.append(command)
    seeds = dict.fromkeys(str(run["train_config"]["seed"]) for run in checkpoints.values())
    commands = "\n".join(dict.fromkeys(lines))  # a dataset is prepared once
    text = (
        f"<p>Built on {datetime.date.today().isoformat()} from commit "
        f"<code>{html.escape(commit())}</code>; training seed {html.escape(', '.join(seeds))}.</p>"
        f"<pre><code>{html.escape(commands)}</code></pre>"
        f'<p>Template <code id="template-sha256">{digest(template)}</code>.</p>'
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()  # as all of the page is


def digest(template: str) -> str:
    """The template's sha256, as the footer of a page has it."""
    return hashlib.sha256(template.encode()).hexdigest()


def as_json(value: dict | None) -> str:
    """JSON for a script element: no symbol of a model's can end it."""
    return json.dumps(value).replace("<", "\\u003c")


def fill(template: str, models: dict, text: dict | None, built: str) -> str:
    """The page: the template with the models, as JSON, and the footer in their places."""
    page = template.replace(BUILT, built)
    page = page.replace(MODELS, as_json(models))
    return page.replace(TEXT, as_json(text))


def load_cups(path: str) -> tuple[GPT, dict]:
    """A model of the shell game and its checkpoint; UserError for one of another text."""
    model, checkpoint = load_model(path)
    try:
        need_games(path, model, checkpoint, n_prompt=1)
    except UserError as error:
        raise UserError(f"{error}. A model of another text is for --text") from None
    return model, checkpoint


def main(argv: list[str]) -> int:
    settings, paths = parse(argv, Settings, doc=__doc__, positional="checkpoint")
    if len(paths) != 2:
        given = f"got {len(paths)}" if paths else "got none"
        raise UserError(f"name two checkpoints, the plain one first, as in: {USAGE}; {given}")
    plain, plain_run = load_cups(paths[0])
    full, full_run = load_cups(paths[1])
    if not without_feedback(paths[0], plain_run):
        raise UserError(f"{paths[0]} is not a plain model; name that first, as in: {USAGE}")
    need_feedback(paths[1], full_run)
    models = {
        "plain": packed(plain, plain_run["tokenizer"], paths[0]),
        "full": packed(full, full_run["tokenizer"], paths[1]),
    }
    checkpoints = {paths[0]: plain_run, paths[1]: full_run}
    text = None
    if settings.text:
        text_model, text_run = load_model(settings.text)
        need_feedback(settings.text, text_run)
        text = packed(text_model, text_run["tokenizer"], settings.text)
        checkpoints[settings.text] = text_run
    template = TEMPLATE.read_text(encoding="utf-8")
    command = f"python -m experiments.play {shlex.join(argv)}"
    page = fill(template, models, text, footer(checkpoints, command, template))
    try:
        write(Path(settings.out), page)
    except OSError as error:
        raise UserError(f"--out={settings.out}: {error}; name a file that can be written") from None
    print(f"wrote {settings.out}, {len(page) / 1e6:.2f} MB; open it in a browser")
    return 0


if __name__ == "__main__":
    run(main)
