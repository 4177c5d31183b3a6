"""A candidate from source to libraries: screening, what it asks to be built, and the builds. Needs
no device.

Guarantees: every candidate ends as a `Prepared`, with libraries or with the finding that ends its
verification; its module runs only in a confined child; a process that is killed from outside
changes nothing, for what it did is done again (`kernels_eval.parent.kill_retry`); an exception from
here means that the machine failed, not the kernel.
"""

from __future__ import annotations

import re
import sysconfig
import time
from pathlib import Path
from typing import Any

from kernels_eval.build.extensions import Builder
from kernels_eval.build.spec import ExtensionSpec
from kernels_eval.build.toolchain import HEADERS, places_of
from kernels_eval.checks.native_screening import screen_native
from kernels_eval.checks.screening import screen
from kernels_eval.config import EvalConfig
from kernels_eval.isolation.landlock import compiler_confinement
from kernels_eval.isolation.sandbox import Child, ChildFailure, ForkServer
from kernels_eval.parent.handles import LOG_BYTES
from kernels_eval.parent.kill_retry import retry_killed
from kernels_eval.parent.messages import Finding, Stop, believe_form
from kernels_eval.records import Candidate, KernelTask, Language, Record

MAX_EXTENSIONS = 16
MISUSED = re.compile(r"TypeError: load(_inline)?\(\) ")
"""A call of load_inline or load that its signature does not allow."""


class Prepared(Record):
    """What the build side found: libraries for the run side, or the finding that ends the
    verification."""

    candidate_id: str
    libraries: dict[str, str] = {}
    finding: Finding | None = None
    flags: tuple[str, ...] = ()
    tier: str | None = None
    cached: bool = False
    seconds: float = 0.0


def confined_builder(
    config: EvalConfig, cache: Path | None = None, cuda_arch: str | None = None
) -> Builder:
    """A builder whose compilers read what they need and write to its own work folder, where this
    kernel can confine them."""
    builder = Builder(config.build, cache=cache, cuda_arch=cuda_arch)
    tools = builder.tools
    homes = [Path(path).resolve().parent.parent for path in (tools.cxx, tools.nvcc) if path]
    own = [
        *places_of(tools.cache),
        tools.torch_dir,
        HEADERS,
        Path(sysconfig.get_paths()["include"]),
    ]
    read = [*own, *homes, *filter(None, [tools.cuda_home])]
    builder.confine = compiler_confinement(read, [builder.work_root])
    return builder


class Preparer:
    """Screens candidates, reads their build requests in a sandboxed process, and builds them. Needs
    no device."""

    def __init__(
        self, config: EvalConfig, *, cache: Path | None = None, cuda_arch: str | None = None
    ) -> None:
        self.config = config
        self.builder = confined_builder(config, cache, cuda_arch)
        self._server: ForkServer | None = None

    @property
    def server(self) -> ForkServer:
        if self._server is None or not self._server.alive:
            self._server = ForkServer(
                threads=self.config.threads, readable=[self.builder.tools.cache]
            )
        return self._server

    def prepare(self, candidate: Candidate, task: KernelTask | None = None) -> Prepared:
        """Screen and build. With the task at hand, so are extensions that the constructor asks for:
        no device waits for them.

        Raises EvalError only where the machine fails.
        """
        return retry_killed(lambda blamed_roles: self._prepare(candidate, task, blamed_roles))

    def _prepare(
        self, candidate: Candidate, task: KernelTask | None, blamed_roles: frozenset[str]
    ) -> Prepared:
        started = time.monotonic()
        flags: tuple[str, ...] = ()
        builds = []
        try:
            if candidate.code is None:
                raise Stop(
                    candidate.parse_reason or "no_code_block",
                    "the response holds no complete module",
                )
            screened = screen(candidate.code)
            flags = screened.flags
            if screened.reason:
                raise Stop(screened.reason, screened.detail)
            if candidate.language is not Language.TRITON:
                for spec in self._capture(candidate.code, task, blamed_roles):
                    native = screen_native(spec.text)
                    flags = tuple(dict.fromkeys((*flags, *native.flags)))
                    if native.reason:
                        raise Stop(native.reason, native.detail)
                    build = self.builder.build(spec)
                    builds.append(build)
                    if not build.ok:
                        raise Stop(
                            build.reason, _first_line(build.log) or "the build failed", build.log
                        )
        except Stop as stop:
            finding: Finding | None = stop.finding
        else:
            finding = None
        return Prepared(
            candidate_id=candidate.candidate_id,
            libraries={b.key: b.path for b in builds if b.ok},
            finding=finding,
            flags=flags,
            tier=next(
                (tier for tier in ("full", "lite") if any(b.tier == tier for b in builds)), None
            ),
            cached=bool(builds) and all(b.cached for b in builds),
            seconds=time.monotonic() - started,
        )

    def _capture(
        self, code: str, task: KernelTask | None, blamed_roles: frozenset[str]
    ) -> list[ExtensionSpec]:
        if "load" not in code:
            return []
        with Child(self.server, "capture", self.config.limits) as child:
            child.blamed_roles = blamed_roles
            path = child.scratch / "candidate.py"
            path.write_text(code, encoding="utf-8", errors="replace")
            try:
                answer = child.request(
                    "capture", path=str(path), timeout=self.config.build.capture_timeout_s
                )
            except ChildFailure as failure:
                raise Stop(
                    "load" if failure.reason == "run" else failure.reason,
                    failure.detail,
                    child.log_tail(LOG_BYTES),
                ) from failure
            asked = answer.get("specs", [])
            if not asked and "error" not in answer and task is not None:
                asked = self._asked_by_constructor(child, task)
            specs = (
                [believe_form(ExtensionSpec, spec) for spec in asked[:MAX_EXTENSIONS]]
                if isinstance(asked, list)
                else []
            )
            if not specs and answer.get("error") in ("no_module", "syntax_error"):
                raise Stop(answer["error"], answer.get("detail", ""), child.log_tail(LOG_BYTES))
            if not specs and MISUSED.match(
                str(answer.get("detail", ""))
            ):  # needs no device to be wrong
                raise Stop(
                    "exception",
                    str(answer["detail"]),
                    f"{answer.get('trace', '')}\n{child.log_tail(LOG_BYTES // 2)}",
                )
            return specs

    def _asked_by_constructor(self, child: Child, task: KernelTask) -> Any:
        """A constructor that fails or hangs here has no device and nothing built: the run side
        judges it."""
        path = child.scratch / "task.py"
        path.write_text(task.code, encoding="utf-8", errors="replace")
        try:
            answer = child.request(
                "construct",
                task_path=str(path),
                init_form=task.init_form,
                timeout=self.config.build.capture_timeout_s,
            )
        except ChildFailure:
            return []
        return answer.get("specs", [])

    def close(self) -> None:
        if self._server:
            self._server.close()


def _first_line(log: str) -> str:
    return next((line.strip() for line in log.splitlines() if line.strip()), "")
