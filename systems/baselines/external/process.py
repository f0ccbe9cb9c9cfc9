"""One rank's process group and the environment variables that packages read; both are put back as they were found."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping

import torch
import torch.distributed as dist

from systems.errors import UnsupportedError


class OneRank:
    """A process group of this process alone, for packages that want one. No port is opened: its store is a file.

    variables: set until close(), those in `defaults` only where they are not set. A group of one rank that is there
    already is used and left.
    """

    def __init__(
        self, backend: str, variables: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None
    ) -> None:
        index = torch.cuda.current_device() if "nccl" in backend else 0
        wanted = {"RANK": "0", "LOCAL_RANK": str(index), "WORLD_SIZE": "1", "LOCAL_SIZE": "1", **(variables or {})}
        wanted |= {name: value for name, value in (defaults or {}).items() if name not in os.environ}
        self._before = {name: os.environ.get(name) for name in wanted}
        self._folder: str | None = None
        if dist.is_initialized() and dist.get_world_size() != 1:
            raise UnsupportedError(f"torch.distributed runs {dist.get_world_size()} ranks here, this system wants one")
        os.environ.update(wanted)
        self._open = True
        if not dist.is_initialized():
            self._folder = tempfile.mkdtemp(prefix="one-rank-")
            store = dist.FileStore(os.path.join(self._folder, "store"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._folder is not None:
            if dist.is_initialized():
                dist.destroy_process_group()
            shutil.rmtree(self._folder, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
