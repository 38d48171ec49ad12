"""The machine that a run uses: its device, number format, compiler, memory, signals, processes."""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.configurator import PROCESS_GROUP, OneProcessError, UserError, tell

# --------------------------------------------------------------------------------------------------
# Device and number format


def pick_device(name: str) -> torch.device:
    """The device; `auto` is the fastest that exists. UserError when there is no such device."""
    if name == "cpu":  # a CPU run asks nothing of CUDA
        return torch.device("cpu")
    have = []
    if torch.cuda.is_available():
        have.append("cuda")
    if torch.backends.mps.is_available():
        have.append("mps")
    have.append("cpu")
    if name == "auto":
        return torch.device(have[0])
    kind, colon, index = name.partition(":")
    index_exists = kind == "cuda" and index.isdigit() and int(index) < torch.cuda.device_count()
    if kind not in have or (colon and not index_exists):
        raise UserError(f"--device={name}: this machine has {', '.join(have)}")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the matrix products.

    auto: bfloat16 on a GPU that has it, float16 on an older one, float32 elsewhere.
    """
    if name == "float16" and device.type != "cuda":
        raise UserError(
            "--dtype=float16 needs cuda, for its loss scaling; "
            f"on {device.type} use bfloat16 or float32"
        )
    if name == "auto":
        name = "float32"
        if device.type == "cuda":
            # PyTorch emulates bfloat16 on GPUs that lack it, many times slower than float16.
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            name = "bfloat16" if native else "float16"
    if name != "float32":  # under autocast RMSNorm's gain is float32, which is meant
        mismatch = "Mismatch dtype between input and weight"
        warnings.filterwarnings("ignore", mismatch, UserWarning)
    return getattr(torch, name)


# --------------------------------------------------------------------------------------------------
# Compiler


def compile_blocks(blocks: Iterable[nn.Module], device: torch.device) -> bool:
    """Compiles each block in place -> whether it did; a notice where the machine has no compiler.

    One graph serves all blocks of the same settings, whatever the number of passes around them:
    compiling the whole step would need one for each number of passes, with and without mixin.
    The modules stay what they are, so the names of their weights do not change.
    """
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:  # no compiler; a cache folder that cannot be written
        reason = type(error).__name__
        tell(f"--compile: no working compiler here ({reason}); continuing in eager")
        return False
    for block in blocks:
        block.compile()
    return True


# --------------------------------------------------------------------------------------------------
# Memory

OUT_OF_MEMORY = (
    "out of memory",  # CUDA and MPS
    "can't allocate memory",  # the CPU's allocator
    "not enough memory",  # the same on Windows
    "Storage size calculation overflowed",  # more bytes than there are numbers for
    "array is too big",  # NumPy's words for the same
    "Maximum allowed dimension exceeded",
    "Overflow when unpacking",  # a size that no whole number of 64 bits holds
)


@contextlib.contextmanager
def memory_for(flags: str):
    """Around work that may need more memory than there is: then an error names the `flags`.

    Of torchrun's processes one may be short of memory alone, so it is a OneProcessError.
    """
    try:
        yield
    except (RuntimeError, MemoryError, ValueError, TypeError) as error:
        reason = str(error).split("\n")[0]
        known = any(words in str(error) for words in OUT_OF_MEMORY)
        if not (known or isinstance(error, (MemoryError, torch.OutOfMemoryError))):
            raise
        raise OneProcessError(f"out of memory ({reason}); lower {flags}") from None


# --------------------------------------------------------------------------------------------------
# Signals


@contextlib.contextmanager
def stop_on_signals():
    """Yields a list that is non-empty once SIGINT, SIGTERM or SIGHUP came.

    The same signal again interrupts at once, except SIGHUP, which a closing terminal sends twice.
    (torchrun sends SIGTERM after a Ctrl-C; that is another signal, and the first still holds.)
    """
    came: list[int] = []

    def handler(number, frame):
        if number in came and number != hangup:
            raise KeyboardInterrupt
        came.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        numbers.append(hangup)  # under nohup it is ignored, and stays so
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python allows handlers in the main thread alone
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# --------------------------------------------------------------------------------------------------
# Processes


def group_from_environment() -> tuple[int, int, int]:
    """(rank, local rank, size) of this process; (0, 0, 1) where no launcher set the variables.

    UserError for a part of them: a leftover `RANK=1` would make a run that saves nothing.
    """
    numbers = [name for name in PROCESS_GROUP[:3] if name in os.environ]
    if not numbers:  # an address without a rank is a setting of the cluster, and starts no group
        return 0, 0, 1
    missing = [name for name in PROCESS_GROUP if name not in os.environ]
    given = ", ".join(f"{name}={os.environ[name]}" for name in numbers)
    way_out = f"start with torchrun, or unset {' '.join(numbers)}"
    if missing:
        what = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{given} in the environment, but {', '.join(missing)} {what} missing: {way_out}"
        )
    try:
        rank, local_rank, size = (int(os.environ[name]) for name in PROCESS_GROUP[:3])
    except ValueError:
        raise UserError(f"{given} in the environment must be whole numbers: {way_out}") from None
    if not (0 <= rank < size and 0 <= local_rank < size):
        raise UserError(f"{given} in the environment: ranks must be below WORLD_SIZE: {way_out}")
    return rank, local_rank, size


class Processes:
    """The processes of a run that torchrun started, or the one of an ordinary run.

    `device` is this process's own. Close it, or use it in a `with` statement.
    """

    def __init__(self, device: torch.device):
        self.rank, local_rank, self.size = group_from_environment()
        self.device = device
        if self.size == 1:
            return
        if device.type == "cuda":
            n_gpus = torch.cuda.device_count()
            if local_rank >= n_gpus:
                raise OneProcessError(
                    f"LOCAL_RANK={local_rank}, but this machine has {n_gpus} GPUs: "
                    f"start torchrun with --nproc_per_node={n_gpus}"
                )
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def wrap(self, model: nn.Module, unused: bool) -> nn.Module:
        """The model whose backward pass averages gradients over the processes.

        unused: a step may leave weights without a gradient.
        """
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

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *failure) -> None:
        self.close()
