"""Follow a configuration through a command: print the files whose functions were handed it.

    python -m tests.support.walk MODULE:CLASS.METHOD COMMAND [ARGUMENT ...] --set KEY=VALUE

The command runs in this process until it calls the method, which ends it. The key is one of
verification's: what is followed is every part of a configuration that holds it. A function was
handed it where an argument of its call is such a part, the text of the override, or a mapping or
object of ours that holds either. One JSON object of file -> functions, in the order of entry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import CO_VARARGS, CO_VARKEYWORDS
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "kernels_eval")
HOLDERS = ("PipelineConfig", "VerificationConfig", "EvalConfig", "TimingConfig")
"""From the outermost inwards, what holds `verification.eval.timing.max_s`."""
FOLDERS = tuple(f"{ROOT / name}/" for name in PACKAGES)


class Walk:
    """A profile function (sys.setprofile) that notes where the configuration goes."""

    def __init__(self, overrides: set[str]) -> None:
        self.files: dict[str, list[str]] = {}
        self._overrides = overrides
        self._looking = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        place = frame.f_code.co_filename
        if event != "call" or self._looking or not place.startswith(FOLDERS):
            return
        if is_importing(frame):
            return
        name = str(Path(place).relative_to(ROOT))
        self._looking = True
        try:
            handed = any(self.is_configuration(value) for value in arguments_of(frame))
        finally:
            self._looking = False
        functions = self.files.setdefault(name, []) if handed else []
        if frame.f_code.co_name not in functions:
            functions.append(frame.f_code.co_name)

    def is_configuration(self, value: Any, nested: bool = True) -> bool:
        if isinstance(value, str):
            return value in self._overrides
        if isinstance(value, BaseModel) and type(value).__name__ in HOLDERS:
            return True
        held: list[Any] = []
        if isinstance(value, dict):
            held = list(value.values())
        elif isinstance(value, list | tuple):
            held = list(value)
        elif type(value).__module__.split(".")[0] in PACKAGES:
            held = list(getattr(value, "__dict__", {}).values())
        # of a mapping or object, what it holds itself, and the texts of its lists
        return any(
            self.is_configuration(each, nested=False)
            for each in held
            if nested or isinstance(each, str)
        )


def arguments_of(frame: FrameType) -> Iterator[Any]:
    """The values that a function was called with."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    for name in code.co_varnames[:count]:
        yield frame.f_locals.get(name)


def is_importing(frame: FrameType | None) -> bool:
    """Is this call part of an import, and not of the command?"""
    while frame:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    end, *words = sys.argv[1:]
    module, _, place = end.partition(":")
    owner, _, method = place.rpartition(".")
    walk = Walk({after for before, after in pairwise(words) if before == "--set"})

    def arrived(*_: object, **__: object) -> None:
        sys.setprofile(None)
        print(json.dumps(walk.files), flush=True)
        raise SystemExit(0)

    setattr(getattr(import_module(module), owner), method, arrived)
    from flows.cli.main import main as concur

    sys.setprofile(walk)
    concur(words)


if __name__ == "__main__":
    main()
