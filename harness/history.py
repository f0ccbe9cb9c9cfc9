"""The git history of this checkout, read and never changed: what was committed when.

Only a whole history proves anything: `find` says why there is none.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_WAIT_S = 120.0


@dataclass(frozen=True)
class NoHistory:
    """why: in words."""

    why: str


class GitHistory:
    """Paths are below root, which is the repository's own folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def git(self, *arguments: str) -> str | None:
        """What it said; None if it failed."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        try:
            command = ["git", "-C", str(self.root), *arguments]
            done = subprocess.run(command, capture_output=True, timeout=_WAIT_S, env=own | {"LC_ALL": "C"})
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None

    def text_at(self, revision: str, path: str) -> str | None:
        """A file as it was in a commit; None: it, or the commit, was not there."""
        return self.git("show", f"{revision}:{path}")

    @cached_property
    def ancestors(self) -> frozenset[str]:
        """Of the commit that is checked out, itself among them."""
        return frozenset((self.git("rev-list", "HEAD") or "").split())

    def commits_of(self, path: str) -> list[str]:
        """Those that changed a file, oldest first."""
        return (self.git("log", "--reverse", "--topo-order", "--format=%H", "--", path) or "").split()

    def changed_later(self, folder: str, suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
        """Files below a folder that a later commit changed or took away, or put elsewhere, with that commit."""
        told = self.git("log", "--no-renames", "--diff-filter=MDT", "--format=%x00%H", "--name-only", "--", folder) or ""
        found = []
        for block in told.split("\0")[1:]:
            commit, *paths = block.split("\n")
            found += [(path, commit) for path in paths if path.endswith(suffixes)]
        return sorted(set(found))


def find(root: Path) -> GitHistory | NoHistory:
    history = GitHistory(root)
    top = history.git("rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():
        return NoHistory("there is no git history here: take a clone")
    if (history.git("rev-parse", "--is-shallow-repository") or "").strip() != "false":
        return NoHistory("this clone is shallow: git fetch --unshallow brings its history")
    return history
