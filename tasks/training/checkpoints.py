"""Checkpoints of a training run: when they are written, which one a run resumes from, and the
adapter that it leaves.

Guarantees: a checkpoint counts only once all of it is on disk and every process has written its
part (a marker file, written last); two are kept, so that a whole one is there while the next is
being written; a checkpoint of another recipe, of other rows or of another base model is never gone
on from and never removed: the run is refused, and what differs is named. The adapter's directory is
there whole or not at all, and the same weights give the same bytes. Does not guarantee anything
against a loss of power (files are not synced), nor where two runs share one directory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kernels_eval.errors import UsageError
from kernels_eval.records import Record, stable_hash
from tasks.files import atomic_directory, atomic_write
from tasks.training.formatting import Rows

if TYPE_CHECKING:
    from transformers import Trainer

T = TypeVar("T")
COMPLETE = "complete.json"
KEPT = 2
TOLD = 8
"""Differences from a checkpoint that an error lists."""
WITHOUT_EFFECT = {"checkpoint_every_steps", "base_url"}
"""Keys of the recipe that change nothing in the adapter, or only by the prompts, which an identity
holds: a run may resume with another value."""


class RunIdentity(Record):
    """What a run trains: a checkpoint belongs to the run whose identity it carries."""

    recipe: dict[str, Any]
    base_model: str
    rows: int
    rows_hash: str

    @classmethod
    def of(cls, recipe: Record, base_model_dir: str | Path, examples: Rows) -> RunIdentity:
        base, texts = Path(base_model_dir), [[row["prompt"], row["completion"]] for row in examples]
        return cls(
            recipe=recipe.model_dump(mode="json", exclude=WITHOUT_EFFECT),
            # a directory may move with the snapshots that it lies among
            base_model=base.name if base.exists() else str(base_model_dir),
            rows=len(examples),
            rows_hash=stable_hash(texts),
        )

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """One line for each thing in which a checkpoint's identity (`other`) differs from this one;
        empty where none does."""
        here, there = self.model_dump(mode="json"), dict(other)
        sides = (there.pop("recipe", {}) | there, here.pop("recipe") | here)
        found = []
        for name in dict.fromkeys(name for side in reversed(sides) for name in side):
            was, now = (_short(side.get(name, "not set")) for side in sides)
            if was != now:
                hashed = name == "rows_hash"
                found.append("the rows themselves" if hashed else f"{name} {was}, now {now}")
        return found


def newest_checkpoint(checkpoints: Path, identity: RunIdentity) -> Path | None:
    """The newest whole checkpoint of this very run, or None.

    What a killed process left half written is removed (by the first process alone). Raises
    UsageError where a whole checkpoint of another run lies there: it says what differs, and nothing
    is removed.
    """
    newest = None
    for directory in sorted(checkpoints.glob("checkpoint-*"), key=checkpoint_step):
        marker = _marker(directory)
        if marker is None:
            if int(os.environ.get("RANK", "0")) == 0:
                shutil.rmtree(directory, ignore_errors=True)
            continue
        if differences := identity.differences(marker):
            more = f"; and {len(differences) - TOLD} more" if len(differences) > TOLD else ""
            raise UsageError(
                f"{directory} is a checkpoint of another run:"
                f" {'; '.join(differences[:TOLD])}{more}",
                "train into another directory, restore the settings of that run, or remove"
                f" {checkpoints} to start again",
            )
        newest = directory
    return newest


def checkpoint_step(checkpoint: Path | None) -> int:
    """Optimiser steps done at a checkpoint; 0 for none."""
    return int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0


def agreed(choice: T) -> T:
    """The first process's choice, in all of them: a shared file system may show a new marker to one
    node before another."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return choice
    chosen = [choice]
    distributed.broadcast_object_list(chosen, src=0)
    return chosen[0]


def save_adapter(trainer: Trainer, adapter_dir: Path) -> Path:
    """Write the trained adapter. Every process must call it, as parameters may be spread over all
    of them; the first one writes."""
    state = _gathered(trainer.model) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        with atomic_directory(adapter_dir) as folder:
            model.save_pretrained(folder, state_dict=state)
            _sort_targets(folder / "adapter_config.json")
            # an earlier run's: a directory cannot be renamed onto one with content
            shutil.rmtree(adapter_dir, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return adapter_dir


def _gathered(model: Any) -> dict[str, Any]:
    """The trainable parameters of a model that FSDP2 spread over all processes, whole and in main
    memory. Collective."""
    from torch.distributed.tensor import DTensor

    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            state[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().cpu()
    return state


def _sort_targets(path: Path) -> None:
    """PEFT keeps the projections as a set, whose order changes from process to process."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def mark(directory: Path, identity: RunIdentity) -> None:
    """Say that a checkpoint is whole, and whose it is."""
    atomic_write(directory / COMPLETE, identity.model_dump_json())


def _marker(directory: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((directory / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def _short(value: Any, longest: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= longest else f"{text[:longest]}..."
