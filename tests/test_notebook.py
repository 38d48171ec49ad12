"""A notebook: the scripts with %run and an experiment with !python, in a real kernel.

A kernel's stdout is not a file: it has no `reconfigure`. Its environment names a plotting backend,
MPLBACKEND, that programs started from it may lack.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
SHAPE = "--n_layer=1 --n_embd=16 --n_head=2 --block_size=16"
STEPS = "--max_iters=3 --batch_size=2 --eval_interval=2 --eval_iters=1 --warmup_iters=1"
CELLS = [
    "%run prepare.py --input=text.txt",
    f"%run train.py --dataset=text --out_dir=out/a --device=cpu {SHAPE} {STEPS}",
    '%run sample.py out/a --mode=soft --prompt "-5+3" --max_new_tokens=4 --device=cpu',
    "%run sample.py out/a --mode=sof",
    "%env MPLBACKEND=backend_that_is_not_installed",
    "!python -m experiments.loss_curves out/a --smooth=1",
    "import sys\nprint('alive', 'model' in sys.modules)",
]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A copy of the project, and an environment in which `python` is this one."""
    for name in ("model.py", "train.py", "sample.py", "prepare.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("harness", "corpora", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "text.txt").write_text("".join(f"{n}-5+3={n - 2}\r\n" for n in range(5, 200)))
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    return tmp_path


def printed(cell) -> tuple[str, str]:
    """What a cell wrote on stdout and on stderr; nothing but the exit of a script may be raised."""
    texts = {"stdout": "", "stderr": ""}
    for output in cell.outputs:
        if output.output_type == "error":
            assert output.ename == "SystemExit", "\n".join(output.traceback)
            texts["stderr"] += f"SystemExit: {output.evalue}\n"
        else:
            texts[output.name] += output.text
    return texts["stdout"], texts["stderr"]


def test_scripts_and_an_experiment_in_a_notebook(project):
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(project)}},
    )
    client.execute()
    prepare, train, sample, mistake, _, experiment, alive = map(printed, notebook.cells)

    assert "wrote data/text: " in prepare[0] and "195 carriage returns" in prepare[1]
    assert "finished at step 3" in train[0]
    assert (project / "out" / "a" / "ckpt.pt").exists()
    text, statistics = sample
    assert text.startswith("-5+3") and len(text) == len("-5+3") + 4 + 1
    assert statistics.startswith("sample.py: soft: 4 tokens")
    assert mistake[0] == ""
    assert mistake[1].splitlines() == [
        "sample.py: --mode: 'sof' is not one of standard, soft, fused, all (did you mean soft?)",
        "SystemExit: 2",
    ]
    assert "Traceback" not in experiment[0] + experiment[1]
    assert (project / "out" / "a" / "loss.png").stat().st_size > 1000, experiment
    assert alive[0] == "alive True\n"
