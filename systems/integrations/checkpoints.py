"""How Trainer's checkpoints are written and read where an engine has the weights.

In a folder `checkpoint-N` lie, as ever, the weights for `from_pretrained` and Trainer's own `trainer_state.json`, and beside
them the folder `engine`, a checkpoint of systems.checkpoint with what is in loop_state.py. No pickle is written, and none read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_NAME

from systems import checkpoint
from systems.integrations.loop_state import check_loop, loop_state, random_state, restore_loop, restore_random
from systems.system import Engine

ENGINE = "engine"
ARGUMENTS = "training_args.json"


def engine_folder(folder: str | Path) -> Path:
    """Of a Trainer's checkpoint. ValueError where no engine saved it."""
    found = Path(folder) / ENGINE
    if not found.is_dir():
        raise ValueError(
            f"{folder} has no folder {ENGINE!r}, from which an OffloadTrainer goes on: it was saved with save_only_model, or "
            "by another Trainer, whose files are pickles; begin anew from its weights, with from_pretrained"
        )
    return found


class CheckpointedTrainer(Trainer):
    """The part of OffloadTrainer that saves and loads.

    engine: None until training or evaluation begins. model_dtype: of the model as it was given, in which its weights are saved.
    """

    engine: Engine | None = None
    model_dtype = torch.float32
    optimizer: Any
    _random: dict[str, torch.Tensor]

    # ---- saving: all ranks do, and the first writes

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        engine = self._started()
        if isinstance(self.model, PreTrainedModel):
            engine.save_pretrained(folder, dtype=self.model_dtype)
        else:
            values = {name: value.clone() for name, value in engine.state_dict(dtype=self.model_dtype).items()}
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                safetensors.torch.save_file(values, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        (folder / ARGUMENTS).write_text(self.args.to_json_string())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """With the random generators, which `_save_rng_state` is called for at the same moment."""
        client_state = loop_state(self.optimizer, self.lr_scheduler)
        checkpoint.save(self._started(), Path(output_dir) / ENGINE, client_state=client_state, own=random_state())

    def _save_rng_state(self, output_dir: str) -> None:
        """See _save_optimizer_and_scheduler."""

    # ---- loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Before there is an engine: that there is a checkpoint for it. Its weights come with the rest."""
        checkpoint.position(engine_folder(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saved = self._load(checkpoint)
            restore_loop(check_loop(saved, self.optimizer.param_groups), self.optimizer, self.lr_scheduler)
            self._random = saved.beside

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Of the checkpoint that was loaded last, when the data is where it was."""
        if checkpoint is not None:
            restore_random(self._random)

    def _load_best_model(self) -> None:
        self._load(self.state.best_model_checkpoint)

    def _load(self, folder: str) -> checkpoint.Loaded:
        return checkpoint.load(self._started(), engine_folder(folder))

    def _started(self) -> Engine:
        """The engine, which is made here if need be."""
        if self.engine is None:
            self.create_optimizer()
        assert self.engine is not None
        return self.engine
