"""What an engine cannot do under Trainer is refused in words, before anything is built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import systems
from systems.errors import UnsupportedError
from systems.integrations import OffloadTrainer
from systems.integrations.checkpoints import CheckpointedTrainer
from systems.integrations.refusals import GIVEN, OF_OWN_LOOPS, SAID_ELSEWHERE
from systems.integrations.trainer import TAKEN_OVER
from tests.integrations.training import OFFLOAD, arguments, offloaded, opt, trainer_of


def set_after(args: Any, **given: Any) -> Any:
    """For what TrainingArguments looks for a GPU or a package for."""
    for name, value in given.items():
        object.__setattr__(args, name, value)
    return args


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"torch_compile": True}, "torch_compile is set: .* leave it off"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing is set: .* offload=dict.recompute='full'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is set: .* choose a batch size"),
        ({"bf16_full_eval": True}, "bf16_full_eval is set: .* leave it off"),
        ({"fp16_full_eval": True}, "fp16_full_eval is set: .* leave it off"),
        (
            {"load_best_model_at_end": True, "save_only_model": True, "save_strategy": "steps", "save_steps": 2},
            "leave save_only_model off",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_flag_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        offloaded(tmp_path, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fsdp": ["full_shard"]}, "fsdp is set: .* use transformers.Trainer"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed is set: .* use transformers.Trainer"),
        ({"parallelism_config": object()}, "parallelism_config is set: .* use transformers.Trainer"),
        ({"activation_checkpointing": True}, "activation_checkpointing is set: .* offload=dict.recompute='full'"),
        ({"_n_gpu": 2}, "2 GPUs are seen by one process, .*DataParallel.*torchrun.*CUDA_VISIBLE_DEVICES"),
        ({"mixed_precision": "fp8"}, "mixed precision is 'fp8'"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_needs_more_than_is_here_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    args = arguments(tmp_path)
    args.device  # noqa: B018 - else what is set is found anew
    with pytest.raises(UnsupportedError, match=said):
        trainer_of(OffloadTrainer, opt(), set_after(args, **given), offload=OFFLOAD)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_what_the_launcher_asks_for_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` says it by the environment, and Accelerate's state has it."""
    made = Trainer.create_accelerator_and_postprocess

    def launched(trainer: Any) -> None:
        made(trainer)
        setattr(trainer, f"is_{name}_enabled", True)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", launched)
    with pytest.raises(UnsupportedError, match=f"^{name} is asked for by what launched this process: "):
        offloaded(tmp_path)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="optimizer .*Adagrad is not supported"):
        offloaded(tmp_path, optim="adagrad").train()


@pytest.mark.parametrize("name", sorted(SAID_ELSEWHERE))
def test_what_the_training_arguments_say_is_not_said_twice(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"offload has {name}: leave it out, the training arguments say it: ")):
        offloaded(tmp_path, offload={**OFFLOAD, name: 1})


@pytest.mark.parametrize("name", sorted(OF_OWN_LOOPS))
def test_what_trainer_cannot_do_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"offload has {name}: leave it out; .* write a loop around"):
        offloaded(tmp_path, offload={**OFFLOAD, name: 2})


def test_an_unknown_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown entry of offload 'device_memry': did you mean device_memory"):
        offloaded(tmp_path, offload={"device_memry": "1GiB"})


def test_what_is_no_mapping_is_refused(tmp_path: Path) -> None:
    odd: Any = "elixir"
    with pytest.raises(ValueError, match=r"offload is 'elixir': give a dict, such as dict\(system='elixir'"):
        offloaded(tmp_path, offload=odd)


def test_every_argument_of_initialize_is_said_somewhere() -> None:
    names = systems.initialize.__annotations__.keys() - {"return"}
    assert {*GIVEN, *SAID_ELSEWHERE, *OF_OWN_LOOPS} == names


def test_what_is_taken_over_is_what_trainer_has() -> None:
    """A method that a version of transformers calls by another name would never be called, which is then said."""
    ours = {name for kind in (OffloadTrainer, CheckpointedTrainer) for name, value in vars(kind).items() if callable(value)}
    own = {"__init__", "__enter__", "__exit__", "close", "_backward", "_load", "_started"}
    assert ours - own == set(TAKEN_OVER)


def test_a_trainer_without_one_of_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systems.integrations.trainer.TAKEN_OVER", ("_get_grad_norm", "_once_called_so"))
    with pytest.raises(UnsupportedError, match="another Trainer, without _once_called_so: "):
        offloaded(tmp_path)


def test_the_library_alone_imports_no_transformers() -> None:
    seen = "import systems, sys; print([name for name in ('transformers', 'accelerate') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
