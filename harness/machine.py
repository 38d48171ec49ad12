"""The machine a run uses: its device, number format, compiler, signals and processes."""

import contextlib
import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.configurator import UserError


def pick_device(name: str) -> torch.device:
    """The device, `auto` being the fastest that exists. UserError when there is no such device."""
    if name == "cpu":  # a CPU run asks nothing of CUDA
        return torch.device("cpu")
    have = (["cuda"] if torch.cuda.is_available() else []) + (["mps"] if torch.backends.mps.is_available() else [])
    have.append("cpu")
    kind, _, index = name.partition(":")
    wrong_index = index and not (kind == "cuda" and index.isdigit() and int(index) < torch.cuda.device_count())
    if name != "auto" and (kind not in have or wrong_index):
        raise UserError(f"--device={name}: this machine has {', '.join(have)}")
    return torch.device(have[0] if name == "auto" else name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the matrix products; auto: bfloat16 on a GPU that has it, float16 on an older one, else float32."""
    if name == "float16" and device.type != "cuda":
        raise UserError(f"--dtype=float16 needs cuda, for its loss scaling; on {device.type} use bfloat16 or float32")
    if name == "auto":
        on_cuda = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float16"
        name = on_cuda if device.type == "cuda" else "float32"
    if name != "float32":  # under autocast RMSNorm's gain is float32, which is meant
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
    return getattr(torch, name)


def compiled(model: nn.Module, device: torch.device) -> nn.Module:
    """torch.compile(model), or the model itself, with a notice, where the machine has no compiler."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except RuntimeError as error:  # what every failure of the compiler's back end derives from
        print(f"--compile: no working compiler here ({type(error).__name__}); going on in eager", file=sys.stderr)
        return model
    return torch.compile(model)


@contextlib.contextmanager
def stop_on_signals():
    """Yields a list that is non-empty once SIGINT or SIGTERM came; a second signal interrupts at once."""
    came = []

    def handler(number, frame):
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Processes:
    """The processes of a run that torchrun started, or the one of an ordinary run."""

    def __init__(self, device: torch.device):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = device
        if self.size > 1:
            if device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def wrap(self, model: nn.Module, unused: bool) -> nn.Module:
        """The model whose backward averages gradients over the processes; unused: a step may leave weights unused."""
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over the processes, the same on all of them."""
        if self.size > 1:
            dist.all_reduce(values)
        return values / self.size

    def any(self, flag: bool) -> bool:
        """Whether it is true on any of the processes."""
        return bool(self.mean(torch.tensor(float(flag), device=self.device)))

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
