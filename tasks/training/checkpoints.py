"""Checkpoints of a training run: when they are written, which one a run resumes from, and the
adapter that it leaves.

Guarantees: a checkpoint counts only once all of it is on disk and every process has written its
part (a marker file, written last); two are kept, so that a whole one is there while the next is
being written. The adapter's directory is there whole or not at all, and the same weights give the
same bytes. Does not guarantee anything
against a loss of power (files are not synced), nor where two runs share one directory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from transformers import Trainer, TrainerCallback

from tasks.files import atomic_directory

T = TypeVar("T")
COMPLETE = "complete"
KEPT = 2


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint, or None. What a killed process left half written is removed (by
    the first process alone)."""
    newest = None
    for directory in sorted(checkpoints.glob("checkpoint-*"), key=checkpoint_step):
        if (directory / COMPLETE).exists():
            newest = directory
        elif int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(directory, ignore_errors=True)
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


class MarkWhole(TrainerCallback):
    """Says of a checkpoint that it is whole: transformers writes it file by file, and every process
    its own part."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            Path(args.output_dir, f"checkpoint-{state.global_step}", COMPLETE).touch()
