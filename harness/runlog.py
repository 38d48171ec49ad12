"""A run's folder: its lock, and its log for programs (log.jsonl) and for people (the terminal)."""

import contextlib
import json
import math
import os
import sys
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from harness.configurator import UserError

LOCK = "lock"  # the lock's file in a run's folder; an unlocked one means nothing


@contextlib.contextmanager
def writing_to(folder: Path):
    """Around the writing of a run's files: an OSError becomes a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out_dir={folder}: {error}; name a folder that can be written") from None


def write_whole(file: Path, text: str) -> None:
    """Writes a file whole or not at all, over the one before. OSError, which leaves that one."""
    part = file.with_name(f"{file.name}.tmp")  # one fixed name: a later write goes over a remnant
    try:
        with open(part, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def missing_folders(folder: Path) -> list[Path]:
    """The folder and those above it that do not exist yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


@contextlib.contextmanager
def locked(folder: Path):
    """Makes the folder and holds it for this process alone, as long as the block runs.

    UserError where another process holds it. The operating system gives the lock up with its
    process, however that ends. Within one process it may be taken again. If the block fails
    before anything was written, a folder that was made for it goes again.
    """
    with writing_to(folder):
        made = missing_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0, thread_local=False, is_singleton=True)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"another process is training in {folder}: wait for it, or give another --out_dir"
            ) from None
    try:
        yield
    finally:
        # While it is still held: once released, the file may be another process's lock. Windows
        # cannot delete an open file, and the folder may have gone meanwhile: then it stays as it
        # is, and whatever ended the block is what the user hears of.
        with contextlib.suppress(OSError):
            if made and os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
        lock.release()
        with contextlib.suppress(OSError):  # not empty: what was written is kept
            for path in made:
                path.rmdir()


def read_log(file: Path) -> list[dict]:
    """The entries of a log.jsonl, none if there is no such file.

    A last line that is torn, as by a killed process, is left out; UserError for any other line
    that is not an entry.
    """
    if not file.exists():
        return []
    entries = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if not (isinstance(entry, dict) and "step" in entry):
            shown = line.strip()[:60]
            raise UserError(f"{file}: {shown!r} is not a line of a log; delete that line")
        entries.append(entry)
    return entries


def read_training(folder: Path) -> list[dict]:
    """The training entries of a run's log, each with its "step" and "losses" by pass. UserError."""
    return [entry for entry in read_log(folder / "log.jsonl") if "losses" in entry]


def read_evaluations(folder: Path) -> list[dict]:
    """The evaluations of a run's log, each with its "step" and "val_losses" by pass. UserError."""
    return [entry for entry in read_log(folder / "log.jsonl") if "val_losses" in entry]


def say(text: str) -> None:
    """Prints a line. A reader of stdout that has gone costs the line, not the run."""
    if sys.stdout is None:  # a program without a console
        return
    try:
        tqdm.write(text)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
    except (OSError, ValueError):  # a closed pipe or terminal; a closed file
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            # What is still buffered, and what comes later, goes nowhere instead.
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class Log:
    """What a run writes: entries to log.jsonl; a progress bar on a terminal, plain lines elsewhere.

    An entry of a step after `step`, the checkpoint's, tells of work that will be done again and is
    dropped. A `fresh` log drops all entries of the run before, but only when `saved` says that the
    first checkpoint has replaced the old one: until then it grows in a file of its own beside it.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        total: int,
        every: int,
        fresh: bool = False,
        active: bool = True,
    ):
        """`every`: training entries are kept every so many steps, 0 for none.

        Only one process of a run is `active`: the others write nothing.
        """
        self.folder = folder
        self.every = every
        self.active = active
        self.pending = False
        self.file = folder / "log.jsonl"
        self.beside = folder / "log.new.jsonl"
        on_terminal = active and sys.stderr is not None and sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=step, unit="step", disable=not on_terminal)
        if not active:
            return
        with writing_to(folder):
            kept = []
            if not fresh:
                self.finish_overwriting()
                kept = [entry for entry in read_log(self.file) if entry["step"] <= step]
            self.beside.unlink(missing_ok=True)  # of a run that ended before its first checkpoint
            self.pending = fresh and (folder / "ckpt.pt").exists()
            lines = "".join(json.dumps(entry) + "\n" for entry in kept)
            write_whole(self.current(), lines)

    def finish_overwriting(self) -> None:
        """Moves the log of a run into place that was killed just after its first checkpoint was.

        All that such a log holds is older than that checkpoint. The log of a run that never saved
        is younger than the checkpoint beside it, which is the former run's.
        """
        checkpoint = self.folder / "ckpt.pt"
        if not (self.beside.exists() and checkpoint.exists()):
            return
        if checkpoint.stat().st_mtime_ns >= self.beside.stat().st_mtime_ns:
            os.replace(self.beside, self.file)

    def current(self) -> Path:
        """The file that entries go to."""
        return self.beside if self.pending else self.file

    def write(self, entry: dict) -> None:
        if not self.active:
            return
        numbers = {}
        for name, value in entry.items():  # JSON has no infinity, which a float16 gradient may be
            finite = not isinstance(value, float) or math.isfinite(value)
            numbers[name] = value if finite else None
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted meanwhile
            with open(self.current(), "a", encoding="utf-8") as file:
                file.write(json.dumps(numbers) + "\n")

    def saved(self) -> None:
        """The run's checkpoint is in place, and now so is its log."""
        if self.pending:
            with writing_to(self.folder):
                os.replace(self.beside, self.file)
            self.pending = False

    def say(self, text: str) -> None:
        if self.active:
            say(text)

    def trained(self, entry: dict) -> None:
        self.bar.update()
        if not self.every or entry["step"] % self.every:
            return
        self.write(entry)
        losses = " ".join(f"{loss:.3f}" for loss in entry["losses"])
        self.bar.set_postfix_str(f"loss {losses}")
        if self.bar.disable:
            self.say(
                f"step {entry['step']:6d}  loss {losses:24s} lr {entry['lr']:.2e}  "
                f"norm {entry['grad_norm']:.2f}  {entry['tokens_per_second']:,} tokens/s"
            )

    def evaluated(self, entry: dict) -> None:
        self.write(entry)
        losses = " ".join(f"{loss:.4f}" for loss in entry["val_losses"])
        self.say(f"step {entry['step']:6d}  validation loss by pass: {losses}")

    def close(self) -> None:
        self.bar.close()
