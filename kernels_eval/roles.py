"""The entry of a forked process: serves one role's commands until its channel closes.

`capture` and `candidate` run a candidate's code. Other roles are imported only where served, so a
candidate's process does not hold their code.
"""

from __future__ import annotations

import os
from importlib import import_module

from kernels_eval.candidate.candidate import CandidateRole
from kernels_eval.candidate.capture import CaptureRole
from kernels_eval.model import measurement, operators
from kernels_eval.model.failures import report
from kernels_eval.model.model_runner import ModelRunner
from kernels_eval.protocol import answer_message, routes_of
from kernels_eval.sandbox import health
from kernels_eval.sandbox.channel import Channel, ChannelClosed

OTHER_ROLES = {
    "reference": "reference.answers:ReferenceRole",
    "compiled": "reference.compiled:CompiledRole",
    "workload": "reference.workload",
    "profile": "reference.operator_times",
    "peaks": "reference.operator_times",
    "health": "sandbox.health",
    "sanitizer": "candidate.sanitized",
    "profiled": "candidate.profiled",
}
"""Modules whose functions are the commands, or whose class has them as methods."""


def warm_up(kind: str) -> None:
    """Do once what all children of a fork server need; "workload" costs seconds and memory that no
    other role needs.
    """
    assert measurement  # imported for every child, which then need not
    operators.warm_up()
    for part in (CandidateRole, ModelRunner, CaptureRole, health):
        routes_of(part)
    if kind == "workload":
        import_module("kernels_eval.reference.workload").warm_up()


def serve(role: str, channel: Channel) -> None:
    channel.accepts_descriptors = True
    session = role_of(role, channel)
    while True:
        try:
            message = channel.receive_record()
        except ChannelClosed:
            return
        command = message["command"]
        try:
            answer = answer_message(getattr(session, "parts", (session,)), message)
        except Exception as error:
            answer = report(error)
        if hasattr(session, "end_command"):
            try:
                session.end_command(command)
            except RuntimeError as error:  # a broken device, of which its handler knows nothing
                answer = report(error)
        descriptors, channel.attached = tuple(channel.attached), []
        channel.send(answer.model_dump(mode="json"), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def role_of(name: str, channel: Channel) -> object:
    if name == "candidate":
        return CandidateRole(channel)
    if name == "capture":
        return CaptureRole()
    module, _, role = OTHER_ROLES[name].partition(":")
    found = import_module(f"kernels_eval.{module}")
    return getattr(found, role)(channel) if role else found
