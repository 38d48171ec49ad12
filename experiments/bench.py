"""Speed and memory of training and decoding, as ratios that hold for the machine at hand.

    python -m experiments.bench                                 the default shape
    python -m experiments.bench out/demo --json=bench.json      a checkpoint's shape and weights
    python -m experiments.bench --n_embd=256 --batch_size=32 --threads=1 --compile=false
    python -m experiments.bench --peers --json=results/bench.json    other libraries beside ours

Wall time, float32, random tokens; see experiments/timing.py for how. --peers has shapes of its own;
its libraries come with requirements-peers.txt.

Close other programs: on a busy CPU several threads wait for each other (--threads=1).
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.peers import compare
from experiments.report import origin, write_json
from experiments.timing import PeakMemory, decode, ratio, train_step, turns, typical
from harness.checkpoint import load_model
from harness.configurator import UserError, parse, require, run, setting
from harness.machine import compile_blocks, pick_device
from model import GPT, Feedback, GPTConfig, Mode, greedy, objective
from train import TrainConfig, make_optimizers

SQUARE = 1024  # side of the matrices that measure the machine's rate
PASSES = (1, 2, 3, 4)  # of a training step
REPLAYS = (1, 2, 4, 8)  # parallel passes that rebuild a cache

Line = tuple[str, float, str]  # a number's name, the number, and what it is


@dataclass(frozen=True)
class Settings:
    batch_size: int = setting(12, "rows of a training step")
    rounds: int = setting(11, "turns of each measurement")
    threads: int = setting(0, "CPU threads of PyTorch; 0: as many as it takes by itself")
    compile: bool = setting(True, "compare compiled blocks with eager ones; takes half a minute")
    peers: bool = setting(False, "only compare with other libraries, in three shapes")
    device: str = setting("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    json: str = setting("", "a file for the numbers", path=True)

    def __post_init__(self):
        require(self, "batch_size", self.batch_size >= 1, "at least 1")
        require(self, "rounds", self.rounds >= 1, "at least 1")
        require(self, "threads", self.threads >= 0, "at least 1, or 0 for PyTorch's choice")


def products(matrices: list[Tensor], n_positions: int) -> Callable[[], object]:
    """Y, dX and dW of each matrix (n_out, n_in), as a training step has them.

    Each has operands of its own, so that none is in the cache because of the one before.
    """
    operands = []
    for weight in matrices:
        n_out, n_in = weight.shape
        dy = torch.randn(n_positions, n_out, device=weight.device)
        x = torch.randn(n_positions, n_in, device=weight.device)
        operands.append((weight, dy, x))

    def multiply() -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(F.linear(x, weight), dy @ weight, dy.T @ x) for weight, dy, x in operands]

    return multiply


# --------------------------------------------------------------------------------------------------
# Sections: each yields its lines


class Trainer:
    """A model with its optimiser and one batch."""

    def __init__(self, model: GPT, settings: Settings):
        config = TrainConfig()
        shape = (settings.batch_size, model.config.block_size)
        device = model.embedding.weight.device
        self.model = model.train()
        self.feedback = Feedback(config.jitter)
        self.idx = torch.randint(model.config.vocab_size, shape, device=device)
        self.targets = torch.randint(model.config.vocab_size, shape, device=device)
        (self.optimizer,) = make_optimizers(model, config)

    def step(self, k: int, recompute: bool = False) -> None:
        """One step of k passes."""
        self.model.recompute = recompute
        train_step(partial(self.loss, k), self.optimizer)
        self.model.recompute = False

    def loss(self, k: int) -> Tensor:
        return objective(self.model(self.idx, self.targets, k, self.feedback))

    def megabytes(self, k: int, recompute: bool = False) -> float:
        """The peak of a step: weights, AdamW's moments, gradients, and what the backward needs."""
        if self.idx.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.idx.device)
            self.step(k, recompute)
            return torch.cuda.max_memory_allocated(self.idx.device) / 1e6
        self.step(k, recompute)  # the first one makes the moments
        with PeakMemory() as memory:
            self.step(k, recompute)
        weights = sum(p.nbytes for p in self.model.parameters())
        moments = 0
        for state in self.optimizer.state.values():
            moments += sum(value.nbytes for value in state.values())
        return (weights + moments + memory.peak) / 1e6


def training(model: GPT, settings: Settings, device: torch.device) -> Iterator[Line]:
    """Steps against the machine's rate, and k passes against k times one."""
    trainer = Trainer(model, settings)
    passes = PASSES if model.fusion is not None else PASSES[:1]
    n_positions = trainer.idx.numel()
    used = []  # by a single pass
    for name, parameter in model.named_parameters():
        if not name.startswith("fusion."):
            used.append(parameter.detach())
    matrices = [p for p in used if p.ndim == 2]
    a = torch.randn(SQUARE, SQUARE, device=device)
    b = torch.randn(SQUARE, SQUARE, device=device)
    things = {"square": lambda: a @ b, "products": products(matrices, n_positions)}
    for k in passes:
        things[f"step {k}"] = partial(trainer.step, k)
    seconds = turns(things, settings.rounds, device)

    square_flops = 2 * SQUARE**3
    n_used = sum(p.numel() for p in used)
    step_flops = 6 * n_used * n_positions
    product_flops = 6 * sum(p.numel() for p in matrices) * n_positions
    gflops = 1e-9 * square_flops / typical(seconds, "square")
    share = step_flops / square_flops * ratio(seconds, "square", "step 1")
    bound = product_flops / square_flops * ratio(seconds, "square", "products")
    work = f"6 x {n_used:,} parameters x {n_positions} tokens"
    square = f"{SQUARE} x {SQUARE} matrix product"
    yield "machine_gflops", gflops, f"GFLOP/s of a {square}, the machine's rate"
    yield "step_share", share, f"of that rate: a single-pass step, {work}"
    yield "products_share", bound, "of that rate: its matrix products alone, which bound the step"
    for k in passes[1:]:
        over = ratio(seconds, f"step {k}", "step 1") / k
        yield f"step_{k}_passes", over, f"a {k}-pass step over {k} times a single-pass one"


def compiling(model: GPT, settings: Settings, device: torch.device) -> Iterator[Line]:
    """Steps with compiled blocks over eager ones, for every number of passes by one compilation."""
    if not settings.compile:
        return
    fast_model = copy.deepcopy(model)  # blocks are compiled in place
    if not compile_blocks(fast_model.blocks, device):
        return
    eager = Trainer(model, settings)
    fast = Trainer(fast_model, settings)
    passes = (1, 3) if model.fusion is not None else (1,)
    things = {}
    for k in passes:
        things[f"eager {k}"] = partial(eager.step, k)
        things[f"fast {k}"] = partial(fast.step, k)
    seconds = turns(things, settings.rounds, device)
    for k in passes:
        over = ratio(seconds, f"fast {k}", f"eager {k}")
        yield f"compiled_{k}_passes", over, f"a {k}-pass step with compiled blocks over eager"


def memory(model: GPT, settings: Settings, device: torch.device) -> Iterator[Line]:
    """A step's peak, without and with recompute, and what recompute costs."""
    trainer = Trainer(model, settings)
    passes = PASSES if model.fusion is not None else PASSES[:1]
    things = {}
    for k in passes:
        things[f"keep {k}"] = partial(trainer.step, k)
        things[f"recompute {k}"] = partial(trainer.step, k, recompute=True)
    seconds = turns(things, settings.rounds, device)
    megabytes = {k: trainer.megabytes(k) for k in passes}
    for k in passes:
        yield f"memory_{k}_passes", megabytes[k], f"MB at the peak of a {k}-pass step"
    for k in passes:
        share = trainer.megabytes(k, recompute=True) / megabytes[1]
        what = f"the peak with --recompute, passes={k}, over that of 1 pass without"
        yield f"recompute_memory_{k}", share, what
    for k in passes:
        over = ratio(seconds, f"recompute {k}", f"keep {k}")
        yield f"recompute_step_{k}", over, f"a {k}-pass step with --recompute over one without"


@torch.no_grad()
def decoding(model: GPT, settings: Settings, device: torch.device) -> Iterator[Line]:
    """A token of one row by mode and without a cache; parallel passes against token by token."""
    model.eval()
    idx = torch.randint(model.config.vocab_size, (1, model.config.block_size), device=device)
    prompt, rest = idx.tensor_split([model.config.block_size // 2], dim=1)
    modes = ("standard",) if model.fusion is None else get_args(Mode)
    replays = REPLAYS[:1] if model.fusion is None else REPLAYS

    def decode_uncached(h: Tensor) -> None:
        for end in range(prompt.size(1) + 1, idx.size(1) + 1):
            greedy(model.head(h[:, -1]))
            h = model.stack(model.embed(idx[:, :end]))

    def replay() -> None:
        decode(model, modes[-1], *model.prefill(prompt, "standard"), rest)

    def parallel(k: int) -> Tensor:
        _, h = model.reconstruct(idx, prompt.size(1), k)
        return model.head(h)

    things = {}
    for mode in modes:
        things[mode] = partial(decode, model, mode, *model.prefill(prompt, mode), rest)
    things["uncached"] = partial(decode_uncached, model.stack(model.embed(prompt)))
    things["replay"] = replay  # feeds each token fused, where there is a fusion
    for k in replays:
        things[f"parallel {k}"] = partial(parallel, k)
    seconds = turns(things, settings.rounds, device)

    rate = rest.size(1) / typical(seconds, "standard")
    yield "standard_tokens", rate, "tokens/s decoded in Standard, one row, after the prefill"
    for mode in modes[1:]:
        over = ratio(seconds, mode, "standard")
        yield f"{mode}_token", over, f"a token decoded in {mode.title()} over Standard"
    over = ratio(seconds, "uncached", "standard")
    yield "uncached_token", over, "a Standard token, all recomputed, over cached"
    for k in replays:
        over = ratio(seconds, f"parallel {k}", "replay")
        yield f"parallel_{k}", over, f"parallel passes, {k} in all, over token by token"


def norms(model: GPT, settings: Settings, device: torch.device) -> Iterator[Line]:
    """Forms of RMSNorm, forward and backward, against LayerNorm."""
    width = (model.config.n_embd,)
    eps = model.config.eps
    shape = (settings.batch_size, model.config.block_size, model.config.n_embd)
    x = torch.randn(shape, device=device, requires_grad=True)
    gain = torch.randn(width, device=device, requires_grad=True)
    dy = torch.randn(shape, device=device)

    def rsqrt_norm() -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain

    forms = {
        "layer_norm": lambda: F.layer_norm(x, width, gain, None, eps),
        "rms_norm": lambda: F.rms_norm(x, width, gain, eps),
        "rsqrt_norm": rsqrt_norm,
    }

    def there_and_back(form: Callable[[], Tensor]) -> None:
        torch.autograd.grad(form(), (x, gain), dy)

    things = {name: partial(there_and_back, form) for name, form in forms.items()}
    seconds = turns(things, settings.rounds, device)
    over = ratio(seconds, "rms_norm", "layer_norm")
    yield "rms_norm", over, "F.rms_norm over F.layer_norm, forward and backward"
    over = ratio(seconds, "rsqrt_norm", "layer_norm")
    yield "rsqrt_norm", over, "x * rsqrt(mean of squares) over F.layer_norm"


SECTIONS = (training, compiling, memory, decoding, norms)


def main(argv: list[str]) -> int:
    settings, config, words = parse(argv, Settings, GPTConfig, doc=__doc__, positional="checkpoint")
    own_shape = bool(words) or config != GPTConfig()
    if len(words) > 1 or (words and config != GPTConfig()):
        given = ", ".join(words)
        rule = "give one checkpoint, which has its own shape, or flags of a shape"
        raise UserError(f"{given}: {rule}")
    if settings.peers and own_shape:
        raise UserError("--peers has shapes of its own: give neither a checkpoint nor a shape")
    file = Path(settings.json)
    if settings.json and (file.is_dir() or not file.parent.is_dir()):
        raise UserError(f"--json={settings.json}: name a file in a folder that exists")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(1)
    began = time.perf_counter()
    device = pick_device(settings.device)
    where = f"{device}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, {where}"
    how = {"where": where}
    if settings.peers:
        print(where, flush=True)
        measured = compare(settings.rounds, settings.compile, device)
    else:
        model = load_model(words[0], str(device))[0] if words else GPT(config).to(device)
        how["model_config"] = asdict(model.config)
        print(f"{settings.batch_size} rows, {model.config}, {where}", flush=True)
        measured = {}
        for section in SECTIONS:
            for name, value, what in section(model, settings, device):
                measured[name] = {"value": value, "what": what}
                print(f"{name:20s}{value:10.4g}  {what}", flush=True)
    if settings.json:
        how = origin("bench", settings, began) | how
        write_json(file, how | {"measured": measured})
    return 0


if __name__ == "__main__":
    run(main)
