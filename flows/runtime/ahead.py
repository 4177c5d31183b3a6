"""Begins what a run's later stages need of this process, while its first ones wait for others.

Guarantees: nothing here fails a run; a stage that needs what is not ready waits for it, or does it
itself and says what goes wrong.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from threading import Thread

from flows.config import PipelineConfig
from tasks.models import count_tokens
from tasks.synthesis.sampler import tokenizer_of

LIBRARIES = "scipy.stats", "matplotlib.figure"
"""Of the observations, which every refresh makes: seconds of a core to import."""


def begin(config: PipelineConfig) -> Thread:
    """Load the generator's tokenizer and import what observations and tracking use, in a thread."""
    thread = Thread(target=_prepare, args=(config,), daemon=True)
    thread.start()
    return thread


def _prepare(config: PipelineConfig) -> None:
    with suppress(Exception):
        if name := tokenizer_of(config.synthesis, config.root):
            count_tokens(name, ["ready"])
    for library in (*LIBRARIES, *["mlflow.tracking"] * config.tracking.enabled):
        with suppress(ImportError):
            import_module(library)
