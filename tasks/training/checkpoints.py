"""Checkpoints of a training run, and the adapter that it leaves. A checkpoint counts once every
process has written its part (marker file last); two are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from transformers import Trainer, TrainerCallback

from kernels_eval.sandbox.trees import remove_tree
from kernels_eval.written import json_of
from tasks.files import atomic_directory

T = TypeVar("T")
COMPLETE = "complete"
KEPT = 2


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint, or None. The first process removes incomplete ones."""
    newest = None
    for directory in sorted(checkpoints.glob("checkpoint-*"), key=checkpoint_step):
        if (directory / COMPLETE).exists():
            newest = directory
        elif int(os.environ.get("RANK", "0")) == 0:
            remove_tree(directory)
    return newest


def checkpoint_step(checkpoint: Path | None) -> int:
    """Optimiser steps done at a checkpoint; 0 for none."""
    return int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0


def agreed(choice: T) -> T:
    """The first process's choice, in all: a shared file system may show a new marker to one node
    first."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return choice
    chosen = [choice]
    distributed.broadcast_object_list(chosen, src=0)
    return chosen[0]


def save_adapter(trainer: Trainer, adapter_dir: Path) -> Path:
    """Write the trained adapter. Every process must call it, as parameters may be sharded; the
    first writes."""
    state = _gathered(trainer.model) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        with atomic_directory(adapter_dir) as folder:
            model.save_pretrained(folder, state_dict=state)
            _sort_targets(folder / "adapter_config.json")
            # an earlier run's: a directory cannot be renamed onto one with content
            remove_tree(adapter_dir)
    trainer.accelerator.wait_for_everyone()
    return adapter_dir


def _gathered(model: Any) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            state[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().cpu()
    return state


def _sort_targets(path: Path) -> None:
    """Sort PEFT's set of projections, whose order varies between processes."""
    config = json_of(path.read_text(encoding="utf-8"))
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


class MarkWhole(TrainerCallback):
    """Marks a checkpoint as complete: transformers writes it file by file, and each process its
    part."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            Path(args.output_dir, f"checkpoint-{state.global_step}", COMPLETE).touch()
