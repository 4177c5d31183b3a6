"""The entry of a forked process: serves the commands of one role until its channel closes.

`capture` reads build requests out of a candidate's module, `candidate` runs the kernel. The other
roles run the task alone, in processes that no candidate enters: they are named here and imported
only where they are served, so a candidate's process does not hold their code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from kernels_eval.checks.inputs import construct, load_module
from kernels_eval.child.build_interception import intercept
from kernels_eval.child.candidate import CandidateRole
from kernels_eval.child.failures import report
from kernels_eval.isolation.channel import Channel, ChannelClosed, Message
from kernels_eval.records import Record

OTHER_ROLES = {
    "reference": "reference.expected_values.Reference",
    "compiled": "reference.compiled.CompiledRole",
    "workload": "reference.workload.Workloads",
    "profile": "reference.operator_times.OperatorTimes",
    "peaks": "reference.operator_times.Peaks",
    "health": "isolation.health.HealthRole",
    "sanitizer": "child.sanitized.Sanitizer",
    "profiled": "child.profiled.Profiled",
}


def serve(role: str, channel: Channel) -> None:
    channel.accepts_descriptors = True
    session = role_of(role)(channel)
    while True:
        try:
            message = channel.receive_record()
        except ChannelClosed:
            return
        handler = getattr(session, f"do_{message.pop('command')}")
        try:
            answer = handler(**message) or {}
        except Exception as error:
            answer = report(error)
        if isinstance(answer, Record):
            answer = answer.model_dump(mode="json")
        descriptors = tuple(answer.pop("_descriptors", ()))
        channel.send(answer, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def role_of(name: str) -> Callable[[Channel], object]:
    """The class that serves a role."""
    if name == "candidate":
        return CandidateRole
    if name == "capture":
        return Capture
    module, _, role = OTHER_ROLES[name].rpartition(".")
    found: Callable[[Channel], object] = getattr(import_module(f"kernels_eval.{module}"), role)
    return found


class Capture:
    """Runs the candidate's module with builds replaced by stubs, and reports what it asked to
    build."""

    def __init__(self, channel: Channel) -> None:
        self.specs: list[Message] = []

    def do_capture(self, path: str) -> Message:
        intercept(self._record)
        try:
            self.module = load_module(path, "candidate")
        except Exception as error:
            # a module that needs its extension at import still told what to build
            return {"specs": self.specs, **report(error)}
        return {"specs": self.specs}

    def do_construct(self, task_path: str, init_form: str) -> Message:
        """What the constructor asks to build. Weights are made without storage; that it fails with
        nothing built yet is expected."""
        with suppress(Exception):
            construct(self.module, "ModelNew", load_module(task_path, "task"), init_form, 0, "meta")
        return {"specs": self.specs}

    def _record(self, spec: Message) -> ModuleType:
        self.specs.append(spec)
        return _Stub(spec["name"])


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"{name} is not built yet")

        return unavailable
