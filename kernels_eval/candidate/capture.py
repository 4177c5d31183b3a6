"""Runs a candidate's module with builds replaced by stubs, and reports what it asks to build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

from kernels_eval.candidate.build_interception import BuildFailed, intercept
from kernels_eval.model.failures import report
from kernels_eval.model.inputs import construct, declared, load_candidate, load_module
from kernels_eval.records import Reason
from kernels_eval.sandbox.channel import Message
from kernels_eval.source.spec import ExtensionSpec


class Capture:
    """Runs the candidate's module with builds replaced by stubs, and reports what it asked to
    build."""

    def __init__(self) -> None:
        self.specs: list[Message] = []

    def do_capture(self, path: str, failed: Sequence[str] = ()) -> Message:
        """Import the module. Requests with these keys fail, for they did when they were built."""
        self.failed = failed
        intercept(self._record)
        try:
            self.module = load_candidate(path)
        except Exception as error:
            # a module that needs its extension at import still told what to build
            return {"specs": self.specs, **report(error)}
        return {"specs": self.specs}

    def do_construct(self, task_path: str, init_form: str) -> Message:
        """What the constructor asks to build. Weights are made without storage; that it fails with
        nothing built yet is expected."""
        asked = {"entry_point": "ModelNew", "init_form": init_form}
        with suppress(Exception):
            task = load_module(task_path, "task")
            construct(self.module, task, declared(asked, "meta", "meta"))
        return {"specs": self.specs}

    def _record(self, spec: Message) -> ModuleType:
        self.specs.append(spec)
        if self.failed and ExtensionSpec.model_validate(spec).key in self.failed:
            raise BuildFailed(Reason.BUILD_FAILED, "")
        return _Stub(str(spec["name"]))


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"{name} is not built yet")

        return unavailable
