"""A candidate from source to libraries: screening, its build requests, and the builds, without a
device. Its module runs only in a confined child; an exception means a machine fault or a killed
process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kernels_eval.compile.cubins import cuobjdump
from kernels_eval.compile.extensions import Builder, generated_lines
from kernels_eval.compile.linked import forbidden_link
from kernels_eval.compile.transforms import BuildTransform
from kernels_eval.config import BUILDS_DEADLINE_SHARE, LOG_BYTES, MOST_BUILDS, EvalConfig
from kernels_eval.judge.messages import (
    NO_MODULE,
    Finding,
    Prepared,
    Stop,
    parse_answer,
    parse_report,
    unanswered,
)
from kernels_eval.protocol import Capture, CaptureConstructor, CaptureReport
from kernels_eval.records import Candidate, KernelTask, Reason
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.sandbox.landlock import compiler_confinement
from kernels_eval.sandbox.process_tree import Deadline
from kernels_eval.sandbox.server_handle import ForkServer
from kernels_eval.source.own_lines import in_own_lines
from kernels_eval.source.screening import Screening, screen, screen_native
from kernels_eval.source.spec import Build, ExtensionSpec
from kernels_eval.toolchain import HEADERS, places_of, python_include

MISUSED = re.compile(r"TypeError: load(_inline)?\(\) ")
"""A call of load_inline or load that its signature does not allow."""


def asks_for_builds(candidate: Candidate) -> bool:
    """Whether a candidate's text may call load or load_inline."""
    return not candidate.language.jit and "load" in (candidate.code or "")


@dataclass
class BoundedBuilds:
    """One process's builds, screened and bounded in number and time. Screening adds to `flags`."""

    builder: Builder
    candidate: Candidate
    flags: list[str]
    made: list[Build] = field(default_factory=list)
    """in this process, or in others before"""
    specs: dict[str, ExtensionSpec] = field(default_factory=dict)
    """of what was built in this process"""

    def __post_init__(self) -> None:
        compiled = [build for build in self.made if not build.cached]
        self.deadline = Deadline(
            BUILDS_DEADLINE_SHARE * self.builder.config.timeout_s,
            spent_s=sum(build.processor_s for build in compiled),
            began=time.monotonic() - sum(build.seconds for build in compiled),
        )

    def note(self, screened: Screening) -> None:
        """Keep the flags. Raises Stop where the source is rejected."""
        self.flags += screened.flags
        if screened.reason:
            raise Stop(screened.reason, screened.detail)

    def build(self, asked: object) -> Build:
        """Build one request. Raises Stop: EXITED_EARLY for no request, BUILD for too many, or a
        rejection.
        """
        spec = parse_report(ExtensionSpec, asked)
        if len(self.made) >= MOST_BUILDS or self.deadline.passed():
            what = f"asks for more than {MOST_BUILDS} builds, or for builds of more than"
            raise Stop(
                Reason.BUILD, f"{what} {self.deadline.limit_s:g} s of processor time and sleep"
            )
        self.note(screen_native(spec.text))
        if spec.uses_cuda and not (self.candidate.language.needs_gpu or self.builder.tools.nvcc):
            log = "CUDA sources in a candidate for the CPU"
            build = Build(ok=False, key=spec.key, reason=Reason.BUILD_FAILED, log=log)
        else:
            build = self.make(spec)
        if build.log and self.candidate.code:
            log = in_own_lines(build.log, generated_lines(spec, self.candidate.code))
            build = build.model_copy(update={"log": log})
        if build.ok and (linked := forbidden_link(build.path)):
            raise Stop(Reason.FORBIDDEN_CALL, f"the built library links {linked}")
        self.made.append(build)
        if build.ok:
            self.specs[spec.key] = spec
        self.deadline.spent_s += 0.0 if build.cached else build.processor_s
        return build

    def make(self, spec: ExtensionSpec) -> Build:
        return self.builder.build(spec)


def confined_builder(
    config: EvalConfig,
    cache: Path | None = None,
    cuda_arch: str | None = None,
    transforms: Mapping[str, BuildTransform] | None = None,
) -> Builder:
    """A builder whose compilers read only what they need and write to its work folder, where
    possible.
    """
    builder = Builder(config.build, cache=cache, cuda_arch=cuda_arch, transforms=transforms)
    tools = builder.tools
    programs = (tools.cxx, tools.nvcc, cuobjdump())
    homes = [Path(path).resolve().parent.parent for path in programs if path]
    read = [*places_of(tools.cache), tools.torch_dir, HEADERS, python_include(), *homes]
    read += filter(None, [tools.cuda_home])
    builder.confine = compiler_confinement(read, [builder.work_root])
    return builder


class Workplace:
    """A confined builder, and a fork server, started whenever needed."""

    def __init__(
        self,
        config: EvalConfig,
        *,
        cache: Path | None = None,
        cuda_arch: str | None = None,
        host: Workplace | None = None,
        server: ForkServer | None = None,
    ) -> None:
        """`host`: whose builder and fork server are used; `server`: a fork server that was started
        already.
        """
        self.config, self._host = config, host
        self.builder: Builder = host.builder if host else confined_builder(config, cache, cuda_arch)
        self._server = server

    @property
    def server(self) -> ForkServer:
        if self._host:
            return self._host.server
        if self._server is None or not self._server.alive:
            self.drop_reference()
            readable = [self.builder.tools.cache]
            self._server = ForkServer(threads=self.config.threads, readable=readable)
        return self._server

    def start(self) -> None:
        """Start the fork server ahead of its use, which raises what goes wrong."""
        self._server = self.server

    @property
    def isolation(self) -> tuple[str, ...]:
        server = (self._host or self)._server
        return server.isolation if server and server.has_started else ()

    def drop_reference(self) -> None:
        """Close the children that are kept, if any."""

    def close(self) -> None:
        self.drop_reference()
        if self._server:
            self._server.close()


class Preparer(Workplace):
    """Screens candidates, reads their build requests in a sandbox, and builds them, without a
    device.
    """

    def prepare(
        self,
        candidate: Candidate,
        task: KernelTask | None = None,
        *,
        beside: Callable[[], None] = lambda: None,
    ) -> Prepared:
        """Screen and build, given the task also the constructor's requests. `beside` begins, once
        the text has passed, what goes on meanwhile. Raises EvalError where the machine fails,
        KilledError.
        """
        started, builds = time.monotonic(), BoundedBuilds(self.builder, candidate, [])
        finding: Finding | None = None
        try:
            self._screen(builds)
            if asks_for_builds(candidate):  # beside a fork server that imports torch
                self.builder.begin_warm(cuda=candidate.language.needs_gpu)
            beside()
            self._build(task, builds)
        except Stop as stop:
            finding = stop.finding
        # one that failed tells nothing of a candidate that went on to another
        made = [build for build in builds.made if finding or build.ok]
        tiers = {build.tier for build in made}
        return Prepared(
            candidate_id=candidate.candidate_id,
            libraries={build.key: build.path for build in made if build.ok},
            specs=tuple(builds.specs.values()),
            finding=finding,
            flags=tuple(dict.fromkeys(builds.flags)),
            tier=next((tier for tier in ("full", "lite") if tier in tiers), None),
            cached=bool(made) and all(build.cached for build in made),
            seconds=time.monotonic() - started,
        )

    def add_build(self, candidate: Candidate, prepared: Prepared) -> Prepared:
        """Make the build that a run asked for. Raises as `prepare`."""
        started = time.monotonic()
        builds = BoundedBuilds(self.builder, candidate, [], [*prepared.late])
        finding: Finding | None = None
        try:
            builds.build(prepared.asked)
        except Stop as stop:
            finding = stop.finding
        return prepared.model_copy(
            update={
                "asked": None,
                "late": tuple(builds.made),
                "finding": finding,
                "flags": (*prepared.flags, *builds.flags),
                "seconds": prepared.seconds + time.monotonic() - started,
            }
        )

    def requested(self, candidate: Candidate, task: KernelTask) -> list[ExtensionSpec]:
        """What a candidate asks to be built, without building it."""
        asked = self._requested_builds(candidate.code or "", task)
        return [parse_report(ExtensionSpec, each) for each in asked]

    def _screen(self, builds: BoundedBuilds) -> None:
        candidate = builds.candidate
        if candidate.code is None:
            reason = candidate.parse_reason or Reason.NO_CODE_BLOCK
            raise Stop(reason, NO_MODULE)
        builds.note(screen(candidate.code))
        if "ModelNew" not in candidate.code:
            raise Stop(Reason.MISSING_MODEL_NEW, "the module defines no ModelNew")

    def _build(self, task: KernelTask | None, builds: BoundedBuilds) -> None:
        code = builds.candidate.code or ""
        if not asks_for_builds(builds.candidate):
            self.builder.end_warm()  # of a candidate before this one
            return
        asked = self._requested_builds(code, task)
        self.builder.end_warm()
        build = self._failed_build(asked, builds)
        while build and build.reason is Reason.BUILD_FAILED:
            # Where the module catches that, it may ask for the build in another way.
            failed = [made.key for made in builds.made if not made.ok]
            asked = self._requested_builds(code, task, failed)
            known = {made.key for made in builds.made}
            asked = [each for each in asked if parse_report(ExtensionSpec, each).key not in known]
            if not asked:
                break
            build = self._failed_build(asked, builds)
        if build:
            lines = filter(None, map(str.strip, build.log.splitlines()))
            raise Stop(Reason(build.reason), next(lines, "the build failed"), build.log)

    def _failed_build(self, asked: list[object], builds: BoundedBuilds) -> Build | None:
        return next((build for each in asked if (build := builds.build(each)).reason), None)

    def _requested_builds(
        self, code: str, task: KernelTask | None, failed: Sequence[str] = ()
    ) -> list[object]:
        limit = self.config.build.capture_timeout_s
        with Child(self.server, "capture", self.config.limits) as child:
            path = child.write_file("candidate.py", code)
            try:
                answer = child.request(Capture(path=str(path), failed=[*failed]), limit)
            except ChildFailure as failure:
                raise unanswered(failure, child, Reason.LOAD) from failure
            report = parse_report(CaptureReport, answer)
            asked = report.specs
            if not asked and not report.error and task is not None:
                asked = self._asked_by_constructor(child, task)
            if not asked:
                self._raise_for_import(report, child)
            return asked[:MOST_BUILDS]

    def _raise_for_import(self, report: CaptureReport, child: Child) -> None:
        if report.error in (Reason.NO_MODULE, Reason.SYNTAX_ERROR):
            raise Stop(Reason(report.error), report.detail, child.log_tail(LOG_BYTES))
        if MISUSED.match(report.detail):
            log = f"{report.trace}\n{child.log_tail(LOG_BYTES // 2)}"
            raise Stop(Reason.EXCEPTION, report.detail, log)

    def _asked_by_constructor(self, child: Child, task: KernelTask) -> list[object]:
        """A constructor's requests. Its faults are judged later: it has no device and nothing
        built.
        """
        path = str(child.write_file("task.py", task.code))
        request = CaptureConstructor(task_path=path, init_form=task.init_form)
        with suppress(ChildFailure):
            answer = child.request(request, self.config.build.capture_timeout_s)
            return parse_answer(request, answer).specs
        return []
