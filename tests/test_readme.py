"""The README's example of an own loop runs as shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from systems.substrate.build import cache_directory

ROOT = Path(__file__).resolve().parent.parent


def test_own_loop_runs_as_shown(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "own_loop.py"
    script.write_text(blocks[0])
    packages = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # which may lie in a folder apart
    environment = {"PYTHONPATH": packages, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(cache_directory().parent)  # what is compiled once is not compiled again for this HOME
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
    assert (tmp_path / "weights.pt").exists()
    peak = int(done.stdout.split()[-1])
    assert 0 < peak <= 8 << 20
