"""`checkpoint.json`: where the run stood, which file has which tensor, and a hash of every file.

Note [The seal]
    Its last field is the SHA-256 of the bytes before that field, so that a changed step count or loss scale is found like a
    changed tensor. Format 1 had neither hashes nor a seal; it is read, and a warning says what cannot be seen in it.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from systems.checkpoint.state import CheckpointError, LoopState, Part
from systems.errors import UnsupportedError
from systems.machine.durable import read_regular

MANIFEST = "checkpoint.json"
MANIFEST_BYTES = 128 << 20  # a parameter takes about 400
DATA = r"^data-[0-9a-f]{16}$"  # the subfolders
BUFFERS = "buffers.safetensors"
BESIDE = "beside.safetensors"
ADAMW = "adamw"
_SEAL = b',\n "seal": "%s"\n}'
_SEALED_BYTES = len(_SEAL % (b"0" * 64))

Count = Annotated[int, Field(ge=0, le=1 << 53)]
FileName = Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")]


class ManifestEntry(BaseModel):
    """files: by part, the file that has it."""

    model_config = ConfigDict(extra="forbid")
    shape: tuple[Count, ...]
    trainable: bool
    updates: Count
    files: dict[Annotated[Part, Field(pattern=r"^[a-z_]{1,64}$")], FileName]


class FileHash(BaseModel):
    model_config = ConfigDict(extra="forbid")
    nbytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """hashes: of every file, by name; None in format 1. optimizer: whose moments there are; not written of AdamW."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[1, 2] = 2
    data: str = Field(pattern=DATA)
    steps: Count
    skipped_steps: Count
    loss_scale: float = Field(gt=0, allow_inf_nan=False)
    good_steps: Count
    skips_in_a_row: Count
    parameters: dict[str, ManifestEntry]
    hashes: dict[FileName, FileHash] | None = None
    optimizer: str = Field(ADAMW, pattern=r"^[\w-]{1,64}$")
    seal: str | None = None

    @property
    def position(self) -> LoopState:
        return LoopState(**self.model_dump(exclude={"format", "data", "parameters", "hashes", "optimizer", "seal"}))

    @property
    def files(self) -> set[str]:
        """All that its data are in."""
        return {BUFFERS, BESIDE, *(file for entry in self.parameters.values() for file in entry.files.values())}


def sealed(manifest: Manifest) -> bytes:
    """The file's content; see Note [The seal]. UnsupportedError for more than would be read."""
    left_out = {"seal", "optimizer"} if manifest.optimizer == ADAMW else {"seal"}
    content = manifest.model_dump_json(indent=1, exclude=left_out).encode().removesuffix(b"\n}")
    if len(content) + _SEALED_BYTES > MANIFEST_BYTES:
        names = len(manifest.parameters)
        raise UnsupportedError(f"checkpoint: {names} parameters are more than {MANIFEST} can name: merge some of them")
    return content + _SEAL % hashlib.sha256(content).hexdigest().encode()


def read_manifest(source: Path) -> Manifest:
    """Raises CheckpointError for one that is missing, damaged or of another kind."""
    path = source / MANIFEST
    try:
        content = read_regular(path, MANIFEST_BYTES)
        manifest = Manifest.model_validate_json(content)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {source}: {MANIFEST} is not there") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is broken{f' at {where}' if where else ''}: {first['msg'].lower()}") from None
    _check(manifest, content, path)
    return manifest


def _check(manifest: Manifest, content: bytes, path: Path) -> None:
    """What its format promises beyond its fields."""
    if manifest.skipped_steps > manifest.steps:
        raise CheckpointError(f"{path} is broken: {manifest.skipped_steps} of {manifest.steps} steps were skipped")
    if manifest.format == 1:
        if manifest.hashes is not None or manifest.seal is not None:
            raise CheckpointError(f"{path} is broken: it says format 1, which has no hashes and no seal")
        return
    if content[-_SEALED_BYTES:] != _SEAL % hashlib.sha256(content[:-_SEALED_BYTES]).hexdigest().encode():
        raise CheckpointError(f"{path} is broken: its content is not what its seal was made of")
    if manifest.hashes is None or manifest.hashes.keys() != manifest.files:
        raise CheckpointError(f"{path} is broken: its hashes are not those of its files")


def warn_of_format(manifest: Manifest, source: Path) -> None:
    if manifest.format == 1:
        warnings.warn(
            f"the checkpoint in {source} is of format 1, without hashes: a flipped bit in it would not be seen; what is saved "
            "from now on has them",
            stacklevel=4,
        )
