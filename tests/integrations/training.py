"""A small run under transformers' Trainer, ours or its own, and the same run as a loop of one's own.

As a program it makes one run in fresh processes and prints it: `python -m tests.integrations.training FOLDER CHECKPOINT`. Where
there are several ranks and no checkpoint, they save one and go on from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

import systems
from systems.integrations import OffloadTrainer

VOCABULARY, LENGTH, SAMPLES, BATCH, ACCUMULATE, EPOCHS = 128, 16, 40, 4, 4, 2
WINDOWS = (4, 4, 2)  # micro-batches of an epoch's steps
CLIP = 0.5
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")


class Ran(NamedTuple):
    """logs: what was logged of each step and evaluation. weights: by name, in the end."""

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens; each sample has another number of labels that count."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
        self.counted = torch.randint(2, LENGTH + 1, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens.where(torch.arange(LENGTH) < self.counted[index], -100)}


class Plain(nn.Module):
    """No transformers model; it takes nothing but its inputs, so that Trainer divides its mean loss by the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def opt(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            dropout=dropout,
            enable_bias=False,  # the key's has no gradient but rounding, which Adam makes as large as any
            use_cache=False,
        )
    )


def plain() -> Any:
    torch.manual_seed(0)
    return Plain()


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "logging_first_step": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 7,
    }
    return TrainingArguments(**(given | more))


def trainer_of(kind: type[Any], model: Any, args: TrainingArguments, **more: Any) -> Any:
    return kind(model, args, train_dataset=Samples(SAMPLES, 1), eval_dataset=Samples(10, 2), **more)


OFFLOAD: dict[str, Any] = {"system": "elixir", "device_memory": "1500KiB"}


def offloaded(folder: Path, model: Any = None, offload: Mapping[str, Any] = OFFLOAD, **more: Any) -> OffloadTrainer:
    trainer: OffloadTrainer = trainer_of(OffloadTrainer, model or opt(), arguments(folder, **more), offload=offload)
    return trainer


def logs_of(trainer: Any) -> list[dict[str, float]]:
    kept = ({name: entry[name] for name in LOGGED if name in entry} for entry in trainer.state.log_history)
    return [entry for entry in kept if "loss" in entry or "eval_loss" in entry]


def finished(trainer: OffloadTrainer) -> Ran:
    """Its engine is closed."""
    assert trainer.engine is not None
    with trainer:
        return Ran(logs_of(trainer), trainer.engine.state_dict())


def own_loop(folder: Path, model: Any, offload: Mapping[str, Any] = OFFLOAD) -> Ran:
    """The same run by `systems.initialize`, with nothing of Trainer's but its data and schedule."""
    source = trainer_of(Trainer, opt(), arguments(folder))  # seeds generators as ours does, and makes data loaders
    data, steps = source.get_train_dataloader(), EPOCHS * len(WINDOWS)
    decayed = source.get_decay_parameter_names(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)
    logs: list[dict[str, float]] = []
    with systems.initialize(
        model, optimizer=optimizer, device="cpu", dtype="fp32", clip=CLIP, accumulate=ACCUMULATE, **offload
    ) as engine:
        for epoch in range(EPOCHS):
            data.set_epoch(epoch)
            batches = iter(data)
            for number, window in enumerate(WINDOWS):
                micro_batches = [next(batches) for _ in range(window)]
                count = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in micro_batches)
                total = torch.tensor(0.0)
                for batch in micro_batches:
                    engine.train()
                    loss = engine(**batch, num_items_in_batch=count).loss
                    engine.backward(loss)
                    total += loss.detach()
                engine.step()
                engine.drain()
                entry: dict[str, Any] = {
                    "loss": total.item(),
                    "grad_norm": engine.outcomes[-1].norm,
                    "learning_rate": schedule.get_last_lr()[0],
                }
                schedule.step()
                step = len(engine.outcomes)
                place: dict[str, Any] = {"epoch": epoch + sum(WINDOWS[: number + 1]) / sum(WINDOWS), "step": step}
                logs.append({**entry, **place})
                if step % 2 == 0:
                    logs.append({"eval_loss": mean_loss(engine, source.get_eval_dataloader()), **place})
            for _ in batches:
                raise AssertionError("an epoch has more batches than its windows")
        assert all(outcome.clip_factor < 1 for outcome in engine.outcomes)
        return Ran(logs, engine.state_dict())


def mean_loss(engine: Any, batches: Iterator[Any]) -> float:
    """As Trainer weighs it: each batch by its samples."""
    engine.eval()
    losses: list[torch.Tensor] = []
    for batch in batches:
        with torch.no_grad():
            count = batch["labels"][:, 1:].ne(-100).sum()
            loss = engine(**batch, num_items_in_batch=count).loss
        losses.append(loss.repeat(BATCH)[: len(batch["labels"])])
    return torch.cat(losses).numpy().mean().item()


def never_unpickled(*_: Any, **__: Any) -> Any:
    raise AssertionError("a pickle is read")


def on_ranks(folder: Path) -> OffloadTrainer:
    """As one rank has it with two micro-batches. After two of ten steps it begins anew from the checkpoint of these.

    What transformers' own Trainer logs of that is kept in the folder.
    """
    given: dict[str, Any] = {"gradient_accumulation_steps": 1}
    theirs = trainer_of(Trainer, opt(dropout=0.0), arguments(folder, **given))
    theirs.train()
    if theirs.args.should_save:
        (folder / "theirs.json").write_text(json.dumps(logs_of(theirs)))
    given |= {"save_strategy": "steps", "save_steps": 2}
    with offloaded(folder, opt(dropout=0.0), **given) as before:
        before.train()
    trainer = offloaded(folder, opt(dropout=0.0), **given)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer


def main(folder: str, checkpoint: str | None = None) -> None:
    """Goes on from a checkpoint. The run's logs are what it prints, its weights are put into the folder."""
    if checkpoint is None:
        trainer = on_ranks(Path(folder))
    else:
        torch.load = never_unpickled  # which ranks use for what they tell each other
        trainer = offloaded(Path(folder))
        trainer.train(resume_from_checkpoint=checkpoint)
    first = trainer.args.should_save
    ran = finished(trainer)
    if first:
        torch.save(ran.weights, Path(folder) / "weights.pt")
        print(json.dumps(ran.logs))  # noqa: T201 - to the process that started this one


if __name__ == "__main__":
    main(*sys.argv[1:])
