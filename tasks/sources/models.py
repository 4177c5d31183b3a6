"""Where a model named in a configuration lives. `small` is the local demo model, built from the
bundled texts on first use."""

from __future__ import annotations

from pathlib import Path

from kernels_eval.errors import UsageError

SMALL = "small"


def resolve_model(name: str, root: str) -> str:
    """A directory or hub id for a configured model name. Builds the small model under `root/models`
    where it is asked for.

    Raises UsageError for a path that does not exist.
    """
    if name == SMALL:
        return str(small_model_dir(root))
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise UsageError(
            f"model directory {name} does not exist",
            "give a hub id, an existing directory, or 'small' for the demo model",
        )
    return name


def small_model_dir(root: str) -> Path:
    """The small model, built once per content of the bundled data. Raises UsageError where it
    cannot be written."""
    from tasks.sources.small_model import SmallModelConfig, build_small_model, small_model_key

    texts, config = bundled_texts(), SmallModelConfig()
    return build_small_model(
        Path(root) / "models" / f"small-{small_model_key(texts, config)[:12]}", texts, config
    )


def bundled_texts() -> list[str]:
    """Everything the small model reads in the demo: task sources and recorded responses, in a fixed
    order."""
    from tasks.sources import bundled

    tasks = bundled.load("all")
    responses = [
        text
        for task in tasks
        for language in ("cpp", "cuda")
        for text in bundled.responses(task.name, language)
    ]
    return [task.code for task in tasks] + responses
