"""What docs/trainer.md shows runs as shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_document_s_programs_run(tmp_path: Path) -> None:
    """One behind the other, in one process, and a third that goes on from the last checkpoint."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trainer.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2, "Trainer, and a loop with Accelerate"
    training = blocks[0].replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)")
    assert training != blocks[0]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    told = []
    for number, program in enumerate(["".join(blocks), training]):
        script = tmp_path / f"program_{number}.py"
        script.write_text(program)
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told.append([line for line in done.stdout.splitlines() if re.fullmatch(r"[\d.]+( \d+)?", line)])
    (loss, peak), *others = (line.split() for line in told[0])
    assert 0 < int(peak) <= 2 << 20
    assert len(others) == 8
    assert told[1][0].split()[0] == loss, "the best of a run that was over is what it found"
    by_trainer, by_hand = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained" / name) for name in ("best", "by_hand")
    )
    assert by_trainer.dtype == by_hand.dtype == torch.float32
