"""Speed and memory of training and decoding, as ratios that hold for the machine at hand.

    python bench.py                                 the default shape
    python bench.py out/demo --json=bench.json      a checkpoint's shape and weights
    python bench.py --n_embd=256 --batch_size=32 --threads=1 --compile=false

Things that are compared take turns, `rounds` times, each long enough for the clock; a ratio is the median of the ratios
within a turn, so that a machine which slows down meanwhile changes little. Wall time, float32, random tokens.
Close other programs: on a busy CPU several threads wait for each other (--threads=1).
"""

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.checkpoint import load_model
from harness.configurator import UserError, parse, run, setting
from harness.machine import compile_blocks, pick_device
from model import GPT, Feedback, GPTConfig, KVCache, Mode, greedy, objective
from train import TrainConfig, make_optimizers

SQUARE = 1024  # side of the matrices that measure the machine's rate
SHORTEST = 0.02  # seconds; what is quicker is repeated within its turn


@dataclass(frozen=True)
class Settings:
    batch_size: int = setting(12, "rows of a training step")
    rounds: int = setting(11, "turns of each measurement")
    threads: int = setting(0, "CPU threads of PyTorch; 0: as many as it takes by itself")
    compile: bool = setting(True, "compare torch.compile with eager; compiling takes most of a minute")
    device: str = setting("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    json: str = setting("", "a file for the numbers", path=True)

    def __post_init__(self):
        if min(self.batch_size, self.rounds) < 1 or self.threads < 0:
            raise ValueError(f"batch_size={self.batch_size}, rounds={self.rounds} must be positive, "
                             f"threads={self.threads} not negative")


def turns(things: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> list[dict[str, float]]:
    """Each round's seconds a call of each thing; two calls before warm it up and tell how often to repeat it."""
    def clock(thing: Callable[[], object], repeats: int = 1) -> float:
        getattr(torch, device.type).synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            thing()
        getattr(torch, device.type).synchronize()
        return (time.perf_counter() - began) / repeats

    repeats = {name: math.ceil(SHORTEST / min(clock(thing), clock(thing))) for name, thing in things.items()}
    return [{name: clock(thing, repeats[name]) for name, thing in things.items()} for _ in range(rounds)]


def ratio(seconds: list[dict[str, float]], one: str, other: str) -> float:
    """How many times as long `one` takes as `other`: the median over rounds."""
    return median(turn[one] / turn[other] for turn in seconds)


def products(matrices: list[Tensor], n_positions: int) -> Callable[[], object]:
    """Y, dX and dW of each matrix (n_out, n_in), as a training step has them, on operands of their own."""
    operands = [(weight, *(torch.randn(n_positions, size, device=weight.device) for size in weight.shape))
                for weight in matrices]
    return lambda: [(F.linear(x, weight), dy @ weight, dy.T @ x) for weight, dy, x in operands]


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward, weights included, each storage once."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # its graph keeps them alive, so that no address is used twice
    return sum(kept.values()) + result.nbytes


def training(model: GPT, settings: Settings, device: torch.device) -> Iterator[tuple[str, float, str]]:
    """Steps against the machine's rate, K passes against K times one, compiled against eager; memory."""
    config, passes = TrainConfig(), (1,) if model.fusion is None else (1, 2, 3, 4)
    (optimizer,), feedback = make_optimizers(model.train(), config), Feedback(config.jitter)
    batch = torch.randint(model.config.vocab_size, (2, settings.batch_size, model.config.block_size), device=device)

    def step(k: int, forward: nn.Module) -> None:
        objective(forward(*batch, k, feedback)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def megabytes(k: int) -> float:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step(k, model)
            return torch.cuda.max_memory_allocated(device) / 1e6
        moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        return (kept_bytes(lambda: model(*batch, k, feedback)) + moments) / 1e6

    used = [p.detach() for name, p in model.named_parameters() if not name.startswith("fusion.")]  # by a single pass
    matrices, a, b = [p for p in used if p.ndim == 2], *torch.randn(2, SQUARE, SQUARE, device=device)
    seconds = turns({"square": lambda: a @ b, "products": products(matrices, batch[0].numel())}
                    | {f"step {k}": partial(step, k, model) for k in passes}, settings.rounds, device)
    n_used, n_in_matrices = (sum(map(torch.numel, tensors)) for tensors in (used, matrices))
    relative = 6 * batch[0].numel() / (2 * SQUARE ** 3)  # FLOPs of a parameter in a step over those of the square
    gflops = 2e-9 * SQUARE ** 3 / median(turn["square"] for turn in seconds)
    yield "machine_gflops", gflops, f"GFLOP/s of a {SQUARE} x {SQUARE} matrix product, the machine's rate"
    yield ("step_share", relative * n_used * ratio(seconds, "square", "step 1"),
           f"of that rate: a single-pass step, 6 x {n_used:,} parameters x {batch[0].numel()} tokens")
    yield ("products_share", relative * n_in_matrices * ratio(seconds, "square", "products"),
           "of that rate: the model's own matrix products alone, which bound the step")
    for k in passes[1:]:
        yield f"step_{k}_passes", ratio(seconds, f"step {k}", "step 1") / k, f"a {k}-pass step over {k} of one pass"
    fast = copy.deepcopy(model)
    if settings.compile and compile_blocks(fast.blocks, device):
        seconds = turns({"eager": partial(step, 1, model), "fast": partial(step, 1, fast)}, settings.rounds, device)
        yield "compiled_step", ratio(seconds, "fast", "eager"), "a single-pass step under torch.compile over eager"
    what = "peak" if device.type == "cuda" else "weights, AdamW's moments, and what the backward needs"
    yield from ((f"memory_{k}_passes", megabytes(k), f"MB of a {k}-pass step: {what}") for k in passes)


@torch.no_grad()
def decoding(model: GPT, settings: Settings, device: torch.device) -> Iterator[tuple[str, float, str]]:
    """A token of one row by mode and without a cache; k parallel passes against the same token by token."""
    idx = torch.randint(model.eval().config.vocab_size, (1, model.config.block_size), device=device)
    prompt, rest = idx.tensor_split([model.config.block_size // 2], dim=1)

    def decode(mode: Mode, cache: KVCache, h: Tensor) -> None:
        cache.length = prompt.size(1)  # forgets the tokens of the call before
        for token in rest.split(1, dim=1):  # given ones, so that all that is compared does the same
            greedy(model.head(h[:, -1]))
            h = model.decode_step(token, h, cache, mode)

    def decode_uncached(h: Tensor) -> None:
        for end in range(prompt.size(1) + 1, idx.size(1) + 1):
            greedy(model.head(h[:, -1]))
            h = model.stack(model.embed(idx[:, :end]))

    modes, ks = (("standard",), (1,)) if model.fusion is None else (get_args(Mode), (1, 2, 4, 8))
    things = {mode: partial(decode, mode, *model.prefill(prompt, mode)) for mode in modes}
    things["uncached"] = partial(decode_uncached, model.stack(model.embed(prompt)))
    things["replay"] = lambda: decode(modes[-1], *model.prefill(prompt, "standard"))  # Soft, where there is a fusion
    things |= {f"parallel {k}": lambda k=k: model.head(model.reconstruct(idx, prompt.size(1), k)[1]) for k in ks}
    seconds = turns(things, settings.rounds, device)
    tokens_a_second = rest.size(1) / median(turn["standard"] for turn in seconds)
    yield "standard_tokens", tokens_a_second, "tokens/s decoded in Standard, one row, after the prefill"
    for mode in modes[1:]:
        yield f"{mode}_token", ratio(seconds, mode, "standard"), f"a token decoded in {mode.title()} over Standard"
    yield "uncached_token", ratio(seconds, "uncached", "standard"), "a Standard token, all recomputed, over cached"
    for k in ks:
        yield f"parallel_{k}", ratio(seconds, f"parallel {k}", "replay"), f"parallel passes, {k}, over token by token"


def norms(model: GPT, settings: Settings, device: torch.device) -> Iterator[tuple[str, float, str]]:
    """Forms of RMSNorm, forward and backward, against LayerNorm."""
    shape, width = (settings.batch_size, model.config.block_size, model.config.n_embd), (model.config.n_embd,)
    x, gain = (torch.randn(size, device=device, requires_grad=True) for size in (shape, width))
    forms = {"layer_norm": lambda: F.layer_norm(x, width, gain, None, model.config.eps),
             "rms_norm": lambda: F.rms_norm(x, width, gain, model.config.eps),
             "rsqrt_norm": lambda: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.eps) * gain}
    seconds = turns({name: partial(lambda form: torch.autograd.grad(form(), (x, gain), x.detach()), form)
                     for name, form in forms.items()}, settings.rounds, device)
    yield "rms_norm", ratio(seconds, "rms_norm", "layer_norm"), "F.rms_norm over F.layer_norm, forward and backward"
    yield "rsqrt_norm", ratio(seconds, "rsqrt_norm", "layer_norm"), "x * rsqrt(mean of squares) over F.layer_norm"


def main(argv: list[str]) -> int:
    settings, config, words = parse(argv, Settings, GPTConfig, doc=__doc__, positional="checkpoint")
    if len(words) > 1 or words and config != GPTConfig():
        raise UserError(f"{', '.join(words)}: give one checkpoint, which has its own shape, or flags of a shape")
    if settings.json and (Path(settings.json).is_dir() or not Path(settings.json).parent.is_dir()):
        raise UserError(f"--json={settings.json}: name a file in a folder that exists")
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    torch.manual_seed(1)
    device, measured = pick_device(settings.device), {}
    model = load_model(words[0], str(device))[0] if words else GPT(config).to(device)
    where = f"{device}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    print(f"{settings.batch_size} rows, {model.config}, {where}", flush=True)
    for section in (training, decoding, norms):
        for name, value, what in section(model, settings, device):
            measured[name] = {"value": value, "what": what}
            print(f"{name:20s}{value:10.4g}  {what}", flush=True)
    if settings.json:
        how = {"settings": asdict(settings), "model_config": asdict(model.config), "where": where}
        Path(settings.json).write_text(json.dumps(how | {"measured": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
