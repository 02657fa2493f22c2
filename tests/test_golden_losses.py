"""The first losses of the demo stay what they were.

They may change when a change is meant to alter training: another model, initialisation, order of
the data, dropout, loss or optimizer, other phrases of Babel, another configs/demo.py, or a version
of JAX that draws or sums otherwise. Then say so in CHANGELOG.md and record them anew, from the root
of the repository:

    python tests/test_golden_losses.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "demo_losses.txt"
STEPS = 20
TOLERANCE = 1e-4  # relative: other processors round otherwise
# One evaluation at the end cannot be left out; a small one changes no loss.
OVERRIDES = f"--train.steps {STEPS} --data.validation validation[:1] --decode.beam_size 1"


def demo_losses(workdir: str | Path) -> list[float]:
    """Of the first steps, by the user's own command, on one device."""
    command = [sys.executable, "train.py", "--config", "configs/demo.py", "--workdir", str(workdir)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command += [*OVERRIDES.split(), "--data.cache", f"{workdir}/cache"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    log = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, log) if "loss" in line]


@pytest.mark.run
def test_the_first_losses_of_the_demo_are_the_golden_ones(tmp_path):
    lines = [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    golden = [(int(step), float(loss)) for step, loss in map(str.split, lines)]
    assert [step for step, _ in golden] == list(range(1, STEPS + 1))
    losses = demo_losses(tmp_path)
    assert losses == pytest.approx([loss for _, loss in golden], rel=TOLERANCE)


def record() -> None:
    """Writes the golden file."""
    with tempfile.TemporaryDirectory() as workdir:
        losses = demo_losses(workdir)
    lines = [
        f"# step and loss of the first {STEPS} steps of configs/demo.py",
        "# recorded by `python tests/test_golden_losses.py`, which says when they may change",
        *[f"{step} {loss}" for step, loss in enumerate(losses, start=1)],
    ]
    GOLDEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    record()
