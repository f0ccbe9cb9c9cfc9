"""The git history of this checkout, read and never changed: what was committed when.

Only a whole history proves anything: `find` says why there is none.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_WAIT_S = 120.0


@dataclass(frozen=True)
class NoHistory:
    """why: in words."""

    why: str


@dataclass
class PathHistory:
    """blobs: every content that a path had in a commit. by: the first commit, merges among them, of each of git's letters for
    what it did to the path, such as M and D.
    """

    blobs: set[str] = field(default_factory=set)
    by: dict[str, str] = field(default_factory=dict)


class GitHistory:
    """Paths are below root, which is the repository's own folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def git(self, *arguments: str, stdin: str = "") -> str | None:
        """What it said; None if it failed."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        try:
            command = ["git", "-C", str(self.root), *arguments]
            done = subprocess.run(
                command, input=stdin.encode(), capture_output=True, timeout=_WAIT_S, env=own | {"LC_ALL": "C"}
            )
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

    def paths_below(self, folder: str, suffixes: tuple[str, ...]) -> dict[str, PathHistory]:
        """All that ever were below a folder, on any line of work that was merged. Raises OSError."""
        every = ("--reverse", "--topo-order", "--full-history", "--root", "-m", "--raw", "--no-abbrev", "--no-renames")
        told = self.git("log", *every, "--format=%x00%H", "--", folder)
        if told is None:
            raise OSError(f"git log told nothing of {folder}: see what it says there")
        found = dict[str, PathHistory]()
        for block in told.split("\0")[1:]:
            commit, *lines = block.splitlines()
            for line in filter(None, lines):
                facts, _, path = line.partition("\t")
                before, after, status = facts.split()[2:]
                if path.endswith(suffixes):
                    each = found.setdefault(path, PathHistory())
                    each.blobs.update(blob for blob in (before, after) if blob.strip("0"))
                    each.by.setdefault(status, commit)
        return found

    def blobs_of(self, paths: Sequence[Path]) -> list[str]:
        """Of files as they are now, in their order: what they would be committed as. Raises OSError."""
        names = "".join(f"{path.resolve()}\n" for path in paths)
        found = (self.git("hash-object", "--stdin-paths", stdin=names) or "").split()
        if len(found) != len(paths):
            raise OSError(f"git hash-object told {len(found)} of {len(paths)} files: see that all can be read")
        return found


def find(root: Path) -> GitHistory | NoHistory:
    history = GitHistory(root)
    top = history.git("rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():
        return NoHistory("there is no git history here: take a clone")
    if (history.git("rev-parse", "--is-shallow-repository") or "").strip() != "false":
        return NoHistory("this clone is shallow: git fetch --unshallow brings its history")
    return history
