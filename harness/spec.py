"""What a user asks of one run: the fields of `RunSpec` are the flags of `harness run`, and nothing else is.

None means "not said": the worker resolves it from the model, the machine or the other flags, and the record's
`resolved` holds what came of it. Nothing here imports torch, so bad input is told at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from systems.messages import ARGUMENT, ESTIMATE
from systems.registry import split_assignments
from systems.sizes import Size

Device = Literal["cuda", "cpu"]
DType = Literal["bf16", "fp16", "fp32"]
Schedule = Literal["constant", "linear", "cosine"]
Recompute = Literal["none", "full"] | tuple[int, ...]

MAX_BLOCKS = 1 << 16  # that --recompute may name: more than any model has, and few enough to list
MAX_SEED = (1 << 63) - 1  # of torch's generators
MAX_RATE = 1e9  # of --lr and --weight-decay: what Adam makes of both still fits fp32
DEFAULT_WARMUP_STEPS = 3
DEFAULT_TIMED_STEPS = 10  # fewer let one odd step decide


KEPT, TRIALS = "results", "runs"  # folders of records: evidence, which is kept, and trial runs on an emulated device


class BadInputError(ValueError):
    """The request cannot be understood, or cannot hold on any machine: told in one line, exit code 2, no record."""


def parse_recompute(given: Any) -> Any:
    """'none', 'full', or blocks such as '0-3,7' -> (0, 1, 2, 3, 7)."""
    if not isinstance(given, str) or given in ("none", "full"):
        return given
    blocks: set[int] = set()
    for part in given.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError("write none, full, or block numbers such as 0-3,7")
        first, last = match[1], match[2] or match[1]
        if len(last) > 9 or int(last) >= MAX_BLOCKS:
            raise ValueError(f"no model has a block {last}: name blocks below {MAX_BLOCKS}, or full for all")
        blocks.update(range(int(first), int(last) + 1))
    return tuple(sorted(blocks))


class RunSpec(BaseModel):
    """Train a model under a system, by one clock, in a fresh process, and keep a record of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    stands_for: ClassVar[Mapping[str, str]] = MappingProxyType({"model": "weights"})
    """Flags that are needed, and the one whose value stands for each where it is left out."""
    of_others: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"--hardware": "is of harness plan: a run takes the machine that it is on, so leave it out"}
    )
    """Flags that are none of these, and whose they are."""

    system: str = Field(description="name of a system: `harness ls systems`")
    model: str = Field(description="name of a model: `harness ls models`")
    set: tuple[str, ...] = Field((), description="field=value: changes a field of the model's shape, such as num_layers=12")
    device: Device | None = Field(None, description="cpu is an emulated device with a budget; default: cuda if there is one")
    device_memory: Size | None = Field(None, description="device budget (40GiB, 64MiB, bytes); default: what the device has")
    host_memory: Size | None = Field(None, description="host budget; default: smallest of cgroup, ulimit and machine")
    disk: str | None = Field(None, min_length=1, description="folder for optimizer states that the host has no room for")
    disk_memory: Size | None = Field(None, description="budget of the files there; default: what is free")
    disk_rate: Size | None = Field(
        None, ge=1, description="bytes a second each way that the disk is held to; default: no limit"
    )
    ranks: int = Field(1, ge=1, description="data-parallel processes, each with a device and batches of its own")
    batch_size: int | None = Field(None, ge=1, description="samples per rank and micro-batch; default: the model's")
    seq_len: int | None = Field(None, ge=1, description="tokens per sample; default: the model's")
    accumulate: int = Field(1, ge=1, description="micro-batches per optimizer step")
    steps: int | None = Field(None, ge=1, description="optimizer steps, warm-up included; default: warm-up + 10")
    warmup: int | None = Field(None, ge=0, description="first steps left out of every timing; default: at most 3")
    dtype: DType = Field("bf16", description="type of weights and gradients as computed with; masters are fp32")
    recompute: Annotated[Recompute, BeforeValidator(parse_recompute)] = Field(
        "none", description="blocks whose activations are recomputed: none, full, or numbers such as 0-3,7"
    )
    clip: float = Field(0.0, ge=0, description="gradient norm to clip to; 0 is off")
    optimizer: str = Field("adamw", description="adamw, sgd, lion, or another file of systems/optimizers")
    hyper: tuple[str, ...] = Field((), description="key=value: a hyperparameter of the optimizer, such as momentum=0.9 of sgd")
    lr: float = Field(1e-4, ge=0, le=MAX_RATE, description="learning rate")
    weight_decay: float = Field(0.01, ge=0, le=MAX_RATE, description="weight decay; of AdamW and Lion the decoupled one")
    schedule: Schedule = Field("constant", description="learning rate over the steps; linear and cosine fall to zero")
    data: str = Field("text", description="text (the Python library's sources), synthetic, or a file or folder of text")
    eval_every: int | None = Field(None, ge=1, description="steps between validation passes, which no timing includes")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="seed of weights, data order and dropout")
    option: tuple[str, ...] = Field((), description="key=value: an option of the system's own")
    repeat: int = Field(1, ge=1, description="runs of the same spec, each in its own process, each with its own record")
    timeout: float | None = Field(None, gt=0, description="seconds after which a run is ended and recorded as timed out")
    results: str | None = Field(
        None, description=f"folder of the records, one JSON file a run; default: {KEPT}, of an emulated device {TRIALS}"
    )
    tag: str | None = Field(None, description="a word to find this run's records by")
    checkpoint: str | None = Field(
        None, min_length=1, description="folder of the run's checkpoint, written at its end in place of the last one"
    )
    save_every: int | None = Field(None, ge=1, description="steps between checkpoints before that, which no timing includes")
    resume: str | None = Field(
        None, min_length=1, description="folder of a checkpoint, of any system, to go on from; it counts in --steps"
    )
    weights: str | None = Field(
        None, min_length=1, description="folder of transformers whose safetensors it begins with; it stands for --model too"
    )
    trace: str | None = Field(None, description="also profile one more step of the first process, into this .json or .json.gz")
    phases: bool = Field(False, description="also run one more step in which nothing overlaps, for the time of each phase")
    wandb: Literal["off", "offline", "online"] = Field("off", description="also log the finished record to Weights & Biases")

    @field_validator("set", "option", "hyper")
    @classmethod
    def _assignments(cls, texts: tuple[str, ...], info: Any) -> tuple[str, ...]:
        try:
            split_assignments(info.field_name, texts)
        except ValueError as error:
            raise ValueError(in_flags(str(error))) from None
        return texts

    @model_validator(mode="after")
    def _something_is_timed(self) -> RunSpec:
        if self.steps is not None and self.warmup is not None and self.warmup >= self.steps:
            raise ValueError(
                f"--warmup {self.warmup} leaves nothing to time in --steps {self.steps}: "
                f"use a warm-up below {self.steps} or more steps"
            )
        return self

    @model_validator(mode="after")
    def _disk_has_a_place(self) -> RunSpec:
        if self.disk_memory is not None and self.disk is None:
            raise ValueError(f"--disk-memory {self.disk_memory} needs a folder: name it with --disk")
        if self.disk_rate is not None and self.disk is None:
            raise ValueError(f"--disk-rate {self.disk_rate} needs a folder: name it with --disk")
        return self

    @model_validator(mode="after")
    def _one_checkpoint(self) -> RunSpec:
        if self.save_every is not None and self.checkpoint is None:
            raise ValueError(f"--save-every {self.save_every} needs a folder: name it with --checkpoint")
        if self.checkpoint is not None and self.repeat > 1:
            raise ValueError(f"--checkpoint is of one run: leave out --repeat {self.repeat}")
        if self.resume is not None and self.weights is not None:
            raise ValueError(f"--resume {self.resume} brings its weights along: leave out --weights, and name the --model")
        return self

    def resolve_steps(self, taken: int = 0) -> tuple[int, int]:
        """(steps, warm-up steps); taken: steps of the run that is resumed, which steps count.

        There is always at least one timed step, or it is a ValueError.
        """
        if self.steps is None:
            warmup = DEFAULT_WARMUP_STEPS if self.warmup is None else self.warmup
            return taken + warmup + DEFAULT_TIMED_STEPS, warmup
        left = self.steps - taken
        if left <= (self.warmup or 0):
            raise ValueError(
                f"the run in --resume {self.resume} has taken {taken} steps, and --steps {self.steps} counts them: nothing is "
                f"left to time after --warmup {self.warmup or 0}: raise --steps{' or lower --warmup' if self.warmup else ''}"
            )
        return self.steps, min(DEFAULT_WARMUP_STEPS, left - 1) if self.warmup is None else self.warmup


def flag(field: str) -> str:
    """'batch_size' -> '--batch-size'; 'for_', which Python has as a word of its own, -> '--for'."""
    return "--" + field.rstrip("_").replace("_", "-")


def in_flags(message: str) -> str:
    """A message of `systems` in the words of this command line.

    There an argument of `systems.initialize` stands in backquotes, with a value as it would be written in Python:
    `device_memory` becomes --device-memory, `dtype='bf16'` --dtype bf16, `options=dict(prefetch=4)` --option prefetch=4.
    What is no flag stays as it is, and `systems.estimate` is harness plan.
    """
    return ARGUMENT.sub(_in_flag, message.replace(ESTIMATE, "harness plan"))


def _in_flag(found: re.Match[str]) -> str:
    name, value = found.groups()
    name = "option" if name == "options" else name
    if name not in RunSpec.model_fields:
        return found[0]
    if value is None:
        return flag(name)
    try:
        given = ast.parse(value, mode="eval").body
        keywords = given.keywords if isinstance(given, ast.Call) else ()
        texts = [f"{each.arg}={ast.literal_eval(each.value)}" for each in keywords] or [f"{ast.literal_eval(given)}"]
    except (SyntaxError, ValueError):
        return f"{flag(name)} {value}"
    return " ".join(f"{flag(name)} {text}" for text in texts)
