"""A run's log: out/<run>/log.jsonl, one JSON object a line, and the same for people on the terminal."""

import contextlib
import json
import sys
from pathlib import Path

from tqdm import tqdm

from harness.configurator import UserError


@contextlib.contextmanager
def writing_to(folder: Path):
    """Around the writing of a run's files: an OSError becomes a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out_dir={folder}: {error}; name a folder that can be written") from None


def read_log(file: Path) -> list[dict]:
    """The entries of a log.jsonl, none if there is no such file.

    A last line that is torn, as by a killed process, is left out; UserError for any other that is no entry.
    """
    entries = []
    for line in file.read_text(errors="replace").splitlines(keepends=True) if file.exists() else []:
        if not line.endswith("\n"):
            break
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if not (isinstance(entry, dict) and "step" in entry):
            raise UserError(f"{file}: {line.strip()[:60]!r} is no line of a log; delete that line")
        entries.append(entry)
    return entries


class Log:
    """What a run writes: entries to folder/log.jsonl, and a progress bar on a terminal or plain lines elsewhere.

    An entry of a step after `step`, the checkpoint's, tells of work that will be done again and is dropped. Training
    entries are kept every `every` steps, 0 for none. Only the first process is `active`: the others write nothing.
    """

    def __init__(self, folder: Path, step: int, total: int, every: int, active: bool):
        self.file, self.every, self.active = folder / "log.jsonl", every, active
        self.bar = tqdm(total=total, initial=step, unit="step", disable=not (active and sys.stderr.isatty()))
        if active:
            kept = [entry for entry in read_log(self.file) if entry["step"] <= step]
            with writing_to(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self.file.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def say(self, text: str) -> None:
        if self.active:
            tqdm.write(text)

    def write(self, entry: dict) -> None:
        if self.active:
            with writing_to(self.file.parent), open(self.file, "a") as file:
                file.write(json.dumps(entry) + "\n")

    def trained(self, entry: dict) -> None:
        self.bar.update()
        if self.every and entry["step"] % self.every == 0:
            self.write(entry)
            losses = " ".join(f"{loss:.3f}" for loss in entry["losses"])
            self.bar.set_postfix_str(f"loss {losses}")
            if self.bar.disable:
                self.say(f"step {entry['step']:6d}  loss {losses:24s} lr {entry['lr']:.2e}  "
                         f"norm {entry['grad_norm']:.2f}  {entry['tokens_per_second']:,} tokens/s")

    def evaluated(self, entry: dict) -> None:
        self.write(entry)
        losses = " ".join(f"{loss:.4f}" for loss in entry["val_losses"])
        self.say(f"step {entry['step']:6d}  validation loss by pass: {losses}")
