"""Files that have to outlive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """What the file or folder holds is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
