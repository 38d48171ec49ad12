"""Other libraries beside ours, at equal parameters and in the same turns.

    python -m experiments.bench --peers

    Hugging Face    transformers' Llama: the same blocks without QK-norm, and no feedback
    x-transformers  its FullBandwidth wrapper, the one other library known to have this method

Each library gets its fastest documented way: scaled_dot_product_attention and its own cache.
Hugging Face's model decodes in several ways, of which the quickest counts: one forward call per
token with either of two caches, its generate, and, with --compile, the compiled model. A library
that is not installed is one line, not an error: pip install --requirement requirements-peers.txt
"""

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from experiments.report import table
from experiments.timing import decode, ratio, train_step, turns, typical
from harness.machine import compile_blocks
from model import GPT, Feedback, GPTConfig, objective
from train import TrainConfig

VOCAB_SIZE = 65  # tiny Shakespeare's characters
N_PASSES = 3
UNIT = 8  # the widths of the MLPs that equal parameters ask for are multiples of this


@dataclass(frozen=True)
class Shape:
    """What is measured: a model's shape, and the rows of a training step. Decoding has one row."""

    n_layer: int
    n_embd: int
    n_head: int
    block_size: int
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.n_layer} x {self.n_embd}, {self.block_size}, {self.batch_size}"


SHAPES = (
    Shape(n_layer=2, n_embd=176, n_head=4, block_size=64, batch_size=12),
    Shape(n_layer=4, n_embd=128, n_head=4, block_size=64, batch_size=12),
    Shape(n_layer=6, n_embd=384, n_head=6, block_size=256, batch_size=8),
)

# What the table shows: its header, the name in the JSON file, and how the value is written.
COLUMNS = (
    ("HF Llama, 1 pass", "hf_step_ms", "{:.1f}"),
    ("ours, plain, 1 pass", "plain_step_ms", "{:.1f}"),
    ("x-transformers, 3 passes", "xt_step_ms", "{:.1f}"),
    ("ours, 3 passes", "soft_step_ms", "{:.1f}"),
    ("ours compiled, 3 passes", "compiled_step_ms", "{:.1f}"),
    ("decode: HF Llama, cached", "hf_dynamic_tokens", "{:.0f}"),
    ("HF Llama, compiled whole", "hf_compiled_tokens", "{:.0f}"),
    ("x-transformers", "xt_tokens", "{:.0f}"),
    ("ours, Standard", "standard_tokens", "{:.0f}"),
    ("ours, Soft", "soft_tokens", "{:.0f}"),
    ("ours compiled, Soft", "soft_compiled_tokens", "{:.0f}"),
)


def n_params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def equal_parameters(make: Callable[[int], nn.Module], shape: Shape, target: int) -> nn.Module:
    """make(width of the MLP) with the width whose model comes nearest to `target` parameters.

    Each unit of width costs 3 n_embd weights per layer: gate, up and down.
    """
    first = make(UNIT)
    missing = target - n_params(first)
    more = round(missing / (3 * shape.n_embd * shape.n_layer * UNIT))
    return make(UNIT + more * UNIT)


class HuggingFace:
    """transformers' Llama."""

    package = "transformers"

    def __init__(self, shape: Shape, target: int, device: torch.device):
        from transformers import LlamaConfig, LlamaForCausalLM

        def make(width: int) -> nn.Module:
            config = LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=shape.n_embd,
                intermediate_size=width,
                num_hidden_layers=shape.n_layer,
                num_attention_heads=shape.n_head,
                max_position_embeddings=shape.block_size,
                tie_word_embeddings=True,
                attn_implementation="sdpa",
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
            )
            return LlamaForCausalLM(config)

        self.block_size = shape.block_size
        self.model = equal_parameters(make, shape, target).to(device)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of next tokens, one pass."""
        logits = self.model(input_ids=idx, use_cache=False).logits  # (B, T, V)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def decoders(
        self, prompt: Tensor, rest: Tensor, compiling: bool
    ) -> dict[str, Callable[[], None]]:
        """Ways of feeding `rest` after `prompt`; the quickest counts.

        Its growing cache and its preallocated one, each in a loop of our own, the latter also with
        the model compiled, and its generate.
        """
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        caches = {
            "hf_dynamic": DynamicCache(config=config),
            "hf_static": StaticCache(config=config, max_cache_len=self.block_size),
        }
        models = {name: self.model for name in caches}
        if compiling:
            caches["hf_compiled"] = StaticCache(config=config, max_cache_len=self.block_size)
            models["hf_compiled"] = torch.compile(self.model)
        ways = {}
        for name, cache in caches.items():
            logits = self.model(input_ids=prompt, cache=cache, use_cache=True).logits
            ways[name] = partial(self.decode, models[name], cache, logits, rest)
        ways["hf_generate"] = partial(
            self.model.generate,
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=rest.size(1),
            min_new_tokens=rest.size(1),
            do_sample=False,
        )
        return ways

    @torch.no_grad()
    def decode(self, model: nn.Module, cache, logits: Tensor, rest: Tensor) -> None:
        for token in rest.split(1, dim=1):  # (B, 1)
            logits[:, -1].argmax(-1)
            logits = model(input_ids=token, cache=cache, use_cache=True).logits
        cache.crop(-rest.size(1))  # as long as it was before


class XTransformers:
    """x_transformers' FullBandwidth: the same method with one more norm on each side of its fusion.

    It leaves the depth scale to the initialisation, and its last hidden state is fed back unnormed.
    """

    package = "x_transformers"

    def __init__(self, shape: Shape, target: int, device: torch.device):
        from x_transformers import Decoder, TransformerWrapper
        from x_transformers.full_bandwidth import FullBandwidth

        def make(width: int) -> nn.Module:
            layers = Decoder(
                dim=shape.n_embd,
                depth=shape.n_layer,
                heads=shape.n_head,
                attn_dim_head=shape.n_embd // shape.n_head,
                attn_flash=True,
                attn_qk_rmsnorm=True,
                rotary_pos_emb=True,
                rotary_emb_dim=shape.n_embd // shape.n_head,
                use_rmsnorm=True,
                ff_glu=True,
                ff_swish=True,
                ff_no_bias=True,
                ff_mult=(width + 0.5) / shape.n_embd,  # it rounds the product down
                depth_scale_residual=True,
            )
            net = TransformerWrapper(
                num_tokens=VOCAB_SIZE,
                max_seq_len=shape.block_size,
                attn_layers=layers,
                use_abs_pos_emb=False,
                tie_embedding=True,
                post_emb_norm=True,
            )
            return FullBandwidth(net, temporal_parallel_passes=N_PASSES)

        self.model = equal_parameters(make, shape, target).to(device)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Its own loss of N_PASSES passes, on T predictions: it shifts the tokens itself."""
        return self.model(torch.cat([idx, targets[:, -1:]], dim=1))

    @torch.no_grad()
    def decoders(
        self, prompt: Tensor, rest: Tensor, compiling: bool
    ) -> dict[str, Callable[[], None]]:
        """One way of feeding `rest` after `prompt`: the loop of its generate, on given tokens.

        It is not compiled: its wrapper makes new functions for every token.
        """
        logits, cache = self.model.net(prompt, return_intermediates=True)
        return {"xt_loop": partial(self.decode, prompt, rest, logits, cache)}

    @torch.no_grad()
    def decode(self, prompt: Tensor, rest: Tensor, logits: Tensor, cache) -> None:
        tokens = torch.cat([prompt, rest], dim=1)  # (B, T)
        for end in range(prompt.size(1) + 1, tokens.size(1) + 1):
            logits[:, -1].argmax(-1)
            logits, cache = self.model.net(
                tokens[:, :end],
                transform_block_inputs=self.model.make_transforms(cache, generate=True),
                cache=cache,
                return_intermediates=True,
            )


PEERS = {"hf": HuggingFace, "xt": XTransformers}


def installed_peers() -> dict[str, type]:
    """The libraries that can be imported; a line on stderr for each that cannot."""
    found = {}
    for name, peer in PEERS.items():
        if importlib.util.find_spec(peer.package) is None:
            way_out = "pip install --requirement requirements-peers.txt"
            print(f"--peers: {peer.package} is left out: not installed; {way_out}", file=sys.stderr)
        else:
            found[name] = peer
    return found


def our_models(shape: Shape) -> tuple[GPT, GPT]:
    """Ours with its fusion, and a plain one of as many parameters."""
    config = GPTConfig(
        vocab_size=VOCAB_SIZE,
        block_size=shape.block_size,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
    )
    model = GPT(config)

    def make(width: int) -> GPT:
        return GPT(replace(config, fusion="none", n_hidden=width))

    return model, equal_parameters(make, shape, n_params(model))


def step_results(
    losses: dict[str, tuple[nn.Module, Callable[[], Tensor]]], rounds: int, device: torch.device
) -> dict[str, float]:
    """name -> (model, its loss): milliseconds per training step, and how ours compare."""
    steps = {}
    for name, (model, loss) in losses.items():
        optimizer = torch.optim.AdamW(model.train().parameters())
        steps[name] = partial(train_step, loss, optimizer)
    seconds = turns(steps, rounds, device)
    found = {}
    for name, (model, _) in losses.items():
        found[f"{name}_params"] = n_params(model)
        found[f"{name}_step_ms"] = 1e3 * typical(seconds, name)
    pairs = (("plain", "hf"), ("soft", "xt"), ("compiled", "soft"), ("compiled", "xt"))
    for one, other in pairs:
        if one in steps and other in steps:
            found[f"{one}_step_over_{other}"] = ratio(seconds, one, other)
    return found


def decoding_results(
    ours: dict[str, Callable[[], None]],
    others: dict[str, dict[str, Callable[[], None]]],
    n_tokens: int,
    rounds: int,
    device: torch.device,
) -> dict[str, float]:
    """Tokens per second by our mode and by each way of each library; its quickest way counts."""
    ways = dict(ours)
    for ways_of_it in others.values():
        ways |= ways_of_it
    seconds = turns(ways, rounds, device)
    found = {f"{way}_tokens": n_tokens / typical(seconds, way) for way in ways}
    for name, ways_of_it in others.items():
        quickest = min(ways_of_it, key=partial(typical, seconds))
        found[f"{name}_tokens"] = found[f"{quickest}_tokens"]
        for mode in ours:
            if mode == "standard":
                continue
            found[f"{mode}_tokens_over_{name}"] = ratio(seconds, quickest, mode)
            for way in ways_of_it:
                found[f"{mode}_tokens_over_{way}"] = ratio(seconds, way, mode)
    found["soft_token_over_standard"] = ratio(seconds, "soft", "standard")
    return found


def measure(
    shape: Shape, peers: dict[str, type], rounds: int, compiling: bool, device: torch.device
) -> dict[str, float]:
    """All numbers of one shape: `step_results` and `decoding_results`."""
    model, plain = our_models(shape)
    others = {name: peer(shape, n_params(model), device) for name, peer in peers.items()}
    model.to(device)
    plain.to(device)
    idx = torch.randint(VOCAB_SIZE, (shape.batch_size, shape.block_size), device=device)
    targets = idx.roll(-1, dims=1)
    feedback = Feedback(TrainConfig.jitter)

    def loss(gpt: GPT, k: int) -> Tensor:
        return objective(gpt(idx, targets, k, feedback))

    losses = {
        "plain": (plain, partial(loss, plain, 1)),
        "soft": (model, partial(loss, model, N_PASSES)),
    }
    fast = copy.deepcopy(model)
    if compiling and compile_blocks(fast.blocks, device):
        losses["compiled"] = (fast, partial(loss, fast, N_PASSES))
    for name, other in others.items():
        losses[name] = (other.model, partial(other.loss, idx, targets))
    found = step_results(losses, rounds, device)

    prompt, rest = idx[:1].tensor_split([shape.block_size // 2], dim=1)
    model.eval()
    ours = {}
    for mode in ("standard", "soft"):
        ours[mode] = partial(decode, model, mode, *model.prefill(prompt, mode), rest)
    if "compiled" in losses:
        fast.eval()
        ours["soft_compiled"] = partial(decode, fast, "soft", *fast.prefill(prompt, "soft"), rest)
    ways = {}
    for name, other in others.items():
        other.model.eval()
        ways[name] = other.decoders(prompt, rest, "compiled" in losses)
    return found | decoding_results(ours, ways, rest.size(1), rounds, device)


def rows_of(measured: dict[str, dict[str, float]]) -> list[list[str]]:
    """The rows of the README's table: shape name -> its numbers."""
    rows = []
    for name, numbers in measured.items():
        cells = [form.format(numbers[key]) if key in numbers else "" for _, key, form in COLUMNS]
        rows.append([name, *cells])
    return rows


def compare(rounds: int, compiling: bool, device: torch.device) -> dict[str, dict[str, float]]:
    """Every shape beside every library that is installed: prints the table, returns its numbers."""
    peers = installed_peers()
    measured = {}
    for shape in SHAPES:
        torch.compiler.reset()  # the compiler keeps a few graphs per function, of all shapes
        measured[shape.name] = measure(shape, peers, rounds, compiling, device)
        print(f"{shape.name}: measured", file=sys.stderr, flush=True)
    print("Milliseconds per training step, tokens per second of one row:\n")
    headers = ["layers x width, block, batch", *(header for header, _, _ in COLUMNS)]
    print(f"{table(headers, rows_of(measured))}\n")
    for name, numbers in measured.items():
        for key, value in numbers.items():
            if "_over_" in key:
                print(f"{name}: {key} {value:.3f}")
    return measured
