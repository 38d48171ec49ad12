"""The numbers of single runs, published with the project: results/ablations/runs/NAME.json.

A report writes those of its runs, and --published takes them instead of training, for runs that
are the same in their tokens, in every setting and in precision: to add an arm or a seed to a sweep
is then to train that arm or seed alone. NAME is the run's folder's name, with a hash of the text
and of the settings that are not defaults.
"""

import json
from pathlib import Path

from experiments.ablations.runs import difference_to, keep_numbers, numbers_of
from experiments.ablations.spec import Spec
from experiments.report import ROOT, write

DIGITS = 7  # of a float32 number: what it has to say


def place(spec: Spec, results_dir: Path) -> Path:
    """The file that a run's numbers are published in."""
    return results_dir / "ablations" / "runs" / f"{Path(spec.train.out_dir).name}.json"


def shortened(value):
    """A number, list or dict of numbers with DIGITS significant digits in each float."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [shortened(part) for part in value]
    if isinstance(value, dict):
        return {name: shortened(part) for name, part in value.items()}
    return value


def publish(spec: Spec, numbers: dict, results_dir: Path) -> None:
    """Writes a finished run's numbers beside a report's. OSError."""
    write(place(spec, results_dir), json.dumps(shortened(numbers)) + "\n")


def take(specs: list[Spec], results_dir: Path = ROOT / "results") -> int:
    """Puts published numbers into the folders of runs that are not finished -> of how many.

    A file whose run was made otherwise (another precision, say, or an older default) is left.
    """
    taken = 0
    for spec in specs:
        file = place(spec, results_dir)
        if numbers_of(spec) is not None or not file.exists():
            continue
        numbers = json.loads(file.read_text(encoding="utf-8"))
        if not difference_to(numbers, spec):
            keep_numbers(spec, numbers)
            taken += 1
    return taken
