"""Runs a candidate's module with builds replaced by stubs, and reports what it asks to build."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

from kernels_eval.candidate.build_interception import BuildFailed, intercept
from kernels_eval.model.failures import report
from kernels_eval.model.inputs import construct, load_candidate, load_module
from kernels_eval.protocol import Capture, CaptureConstructor, CaptureReport, ModelSpec, handles
from kernels_eval.records import Reason
from kernels_eval.sandbox.channel import Message
from kernels_eval.source.spec import ExtensionSpec


class CaptureRole:
    """Reports what a candidate's module asks to build."""

    def __init__(self) -> None:
        self.specs: list[Message] = []

    @handles(Capture)
    def capture(self, request: Capture) -> CaptureReport:
        """Import the module. Builds with keys in `failed` fail, as they did when made."""
        self.failed = request.failed
        intercept(self._record)
        try:
            self.module = load_candidate(request.path)
        except Exception as error:
            # a module that needs its extension at import still told what to build
            return CaptureReport(specs=list(self.specs), **report(error).model_dump())
        return CaptureReport(specs=list(self.specs))

    @handles(CaptureConstructor)
    def capture_constructor(self, request: CaptureConstructor) -> CaptureReport:
        """What the constructor asks to build, without weight storage; it may fail without a
        build.
        """
        spec = ModelSpec(
            entry_point="ModelNew",
            init_form=request.init_form,
            device="meta",
            construct_on="meta",
        )
        with suppress(Exception):
            construct(self.module, load_module(request.task_path, "task"), spec)
        return CaptureReport(specs=list(self.specs))

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
