"""How speed and memory are measured: turns, their ratios, and the two things that are timed.

Whatever is compared takes turns, and a ratio is the median of the ratios within a turn. So a
machine that slows down meanwhile, or another program that wakes up, changes little.
"""

import math
import time
import weakref
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, KVCache, Mode, greedy
from train import TrainConfig

SHORTEST = 0.02  # seconds; what is quicker is repeated within its turn

Seconds = list[dict[str, float]]  # of each turn: the seconds that a call of each thing took


def turns(
    things: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    clock: Callable[[], float] | None = None,
) -> Seconds:
    """Each turn's seconds per call of each thing.

    Two calls of each come first. They warm it up and tell how often a turn repeats it. clock: read
    in the turns in place of time.perf_counter, such as time.process_time for CPU seconds.
    """
    backend = getattr(torch, device.type)
    # CUDA waits for its current device unless told another; mps has one, and takes no argument.
    which = (device,) if device.type == "cuda" else ()

    def measured(thing: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
        backend.synchronize(*which)
        began = clock()
        for _ in range(repeats):
            thing()
        backend.synchronize(*which)
        return (clock() - began) / repeats

    wall = time.perf_counter
    repeats = {}
    for name, thing in things.items():
        quickest = min(measured(thing, 1, wall), measured(thing, 1, wall))
        repeats[name] = math.ceil(SHORTEST / quickest)
    seconds = []
    for _ in range(rounds):
        turn = {}
        for name, thing in things.items():
            turn[name] = measured(thing, repeats[name], clock or wall)
        seconds.append(turn)
    return seconds


def ratio(seconds: Seconds, one: str, other: str) -> float:
    """How many times as long `one` takes as `other`: the median over turns."""
    return median(turn[one] / turn[other] for turn in seconds)


def typical(seconds: Seconds, name: str) -> float:
    """Seconds per call: the median over turns."""
    return median(turn[name] for turn in seconds)


def train_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
    """One optimiser step on a scalar loss, as train.py takes it."""
    loss().backward()
    weights = []
    for group in optimizer.param_groups:
        weights += group["params"]
    nn.utils.clip_grad_norm_(weights, TrainConfig.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def decode(model: GPT, mode: Mode, cache: KVCache, h: Tensor, rest: Tensor) -> None:
    """Feeds the tokens `rest` (B, T) one by one, picking the likeliest next token each time.

    The tokens are given, so that whatever is compared does the same work. cache, h: what
    `GPT.prefill` returned; the cache is afterwards as long as it was before.
    """
    length = cache.length
    for token in rest.split(1, dim=1):  # (B, 1)
        greedy(model.head(h[:, -1]))
        h = model.decode_step(token, h, cache, mode)
    cache.length = length


class PeakMemory(TorchDispatchMode):
    """Within `with PeakMemory() as memory:`, memory.peak is the most bytes that new tensors held.

    It counts each storage that an operation returns until nothing refers to it. So it sees what
    autograd keeps and what it frees, but neither older tensors nor an operation's own scratch.
    """

    def __init__(self):
        super().__init__()
        self.held = 0
        self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        older = {id(storage) for storage in storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            if id(storage) not in older and storage not in self.known:
                self.hold(storage)
        return result

    def hold(self, storage: torch.UntypedStorage) -> None:
        n_bytes = storage.nbytes()
        self.known.add(storage)
        self.held += n_bytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self.release, n_bytes)

    def release(self, n_bytes: int) -> None:
        self.held -= n_bytes


def storages(values: object) -> list[torch.UntypedStorage]:
    """The storages of all tensors in nested tuples, lists and dicts."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]
