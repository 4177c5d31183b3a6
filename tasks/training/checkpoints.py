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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.files import atomic_directory, atomic_write
from tasks.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl.trainer.sft_trainer import SFTTrainer

COMPLETE = "complete.json"
KEPT = 2
TOLD = 8
"""Differences from a checkpoint that an error lists."""
HISTORY_FIELDS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "num_tokens")
WITHOUT_EFFECT = ("checkpoint_every_steps",)
"""Keys of the recipe that change nothing in the adapter: a run may resume with another value."""

OnLog = Callable[[dict[str, float]], None]


class RunIdentity(BaseModel):
    """What a run trains: a checkpoint belongs to the run whose identity it carries."""

    model_config = ConfigDict(frozen=True)

    recipe: dict[str, Any]
    base_model: str
    rows: int
    rows_hash: str

    @classmethod
    def of(
        cls,
        recipe: TrainingRecipe,
        base_model_dir: str | Path,
        examples: Sequence[Mapping[str, Any]],
    ) -> RunIdentity:
        base = Path(base_model_dir)
        return cls(
            recipe=recipe.model_dump(mode="json", exclude=set(WITHOUT_EFFECT)),
            # a directory may move with the snapshots that it lies among
            base_model=(base.name if base.exists() else str(base_model_dir)),
            rows=len(examples),
            rows_hash=stable_hash(
                [[example["prompt"], example["completion"]] for example in examples]
            ),
        )

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """One line for each thing in which a checkpoint's identity (`other`) differs from this one;
        empty where none does."""
        here, there = self.model_dump(mode="json"), dict(other)
        recipe_here, recipe_there = here.pop("recipe"), there.pop("recipe", {})
        found = []
        for left, right in ((recipe_there, recipe_here), (there, here)):
            for name in dict.fromkeys([*right, *left]):
                was, now = left.get(name, "not set"), right.get(name, "not set")
                if was != now:
                    found.append(
                        "the rows themselves"
                        if name == "rows_hash"
                        else f"{name} {_short(was)}, now {_short(now)}"
                    )
        return found


def newest_checkpoint(checkpoints: Path, identity: RunIdentity) -> Path | None:
    """The newest whole checkpoint of this very run, or None.

    What a killed process left half written is removed (by the first process alone). Raises
    UsageError where a whole checkpoint of another run lies there: it says what differs, and nothing
    is removed.
    """
    usable = {}
    for directory in sorted(checkpoints.glob("checkpoint-*")):
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
                "train into another directory, or go back to what it was made with, or remove"
                f" {checkpoints} to begin anew",
            )
        usable[int(directory.name.removeprefix("checkpoint-"))] = directory
    return usable[max(usable)] if usable else None


def checkpoint_step(checkpoint: Path | None) -> int:
    """Optimiser steps done at a checkpoint; 0 for none."""
    return int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0


def agreed(checkpoint: Path | None) -> Path | None:
    """The first process's choice, in all of them: a shared file system may show a new marker to one
    node before another."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return checkpoint
    chosen = [str(checkpoint) if checkpoint else None]
    distributed.broadcast_object_list(chosen, src=0)
    return Path(chosen[0]) if chosen[0] else None


def watch(identity: RunIdentity, every_steps: int, on_log: OnLog | None) -> TrainerCallback:
    """Asks for a checkpoint every so many steps and at the end of each epoch, marks it once it is
    whole, hands each log entry on, and keeps the token count whole across a resume. `on_log` is
    called in the first process only."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        tokens_before = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # TRL counts tokens from zero in each process; what came before stands in the restored
            # history
            self.tokens_before = next(
                (entry["num_tokens"] for entry in reversed(state.log_history) if "loss" in entry), 0
            )

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            entry = state.log_history[-1]
            if "loss" not in entry:  # the summary at the end
                return
            entry["num_tokens"] += self.tokens_before
            if on_log is not None and state.is_world_process_zero:
                on_log({name: entry[name] for name in HISTORY_FIELDS})

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # the last step of an epoch is saved with the epoch's end: after what is evaluated then,
            # which a resumed run must not miss
            if state.global_step % every_steps == 0 and not float(state.epoch).is_integer():
                control.should_save = True

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # transformers writes a checkpoint file by file, and every process its own part: only
            # this marker, after all of them, says that it is whole
            args.distributed_state.wait_for_everyone()
            if state.is_world_process_zero:
                _mark(Path(args.output_dir, f"checkpoint-{state.global_step}"), identity)

    return Watch()


def save_adapter(trainer: SFTTrainer, adapter_dir: Path) -> Path:
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
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _mark(directory: Path, identity: RunIdentity) -> None:
    atomic_write(directory / COMPLETE, identity.model_dump_json())


def _marker(directory: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((directory / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def _short(value: Any, longest: int = 60) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= longest else f"{text[:longest]}..."
