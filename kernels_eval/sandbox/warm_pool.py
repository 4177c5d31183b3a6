"""A warm pool: children with their device ready before there is work; also closes children in the
background. A CUDA context and its kernels take 0.4 to 1.1 s, freeing its memory 0.1 s: both overlap
with other work, but not with timing (`quiet`, `settle`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property

from kernels_eval.config import EvalConfig
from kernels_eval.errors import EvalError, SandboxError
from kernels_eval.languages import Language
from kernels_eval.protocol import Prepare
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.sandbox.server_handle import ForkServer

PREPARE_S = 60.0
CANDIDATE, REFERENCE, COMPILING = "candidate", "reference", "compiling"
"""Kinds of children: `COMPILING` is a candidate that may start compilers."""
WANTED = {CANDIDATE: 4, REFERENCE: 2, COMPILING: 2}
"""Warm children of a kind: several, as a verdict may take less time than a child to get ready. Of
`COMPILING` none is wanted before the first."""
THREADS = 4
"""That start and close children: one that starts waits for no end of another."""


class WarmPool:
    """Warm children of each role, on one device. `ahead` starts them before they are asked for."""

    def __init__(self, config: EvalConfig, device: str, *, ahead: bool) -> None:
        self.config, self.device, self.ahead = config, device, ahead
        self.starting: dict[str, deque[tuple[ForkServer, Future[Child]]]] = {
            kind: deque() for kind in WANTED
        }
        self.language: Language | None = None
        """The one last compiled in a candidate's process."""
        self._closing: list[Future[None]] = []
        self.beside: list[Child] = []
        """Other children that get ready beside other work."""

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "warm pool")

    def start_child(self, server: ForkServer, kind: str) -> Child:
        """A child of this server. Raises SandboxError where the fork server fails."""
        return self.warm_child(server, kind) or self._child(server, kind)

    def start_compiling(self, server: ForkServer, language: Language) -> Child:
        """A candidate's child that may start compilers. Raises as `start_child`."""
        self.language = language if language.jit else self.language
        return self.start_child(server, COMPILING)

    def replenish(self, server: ForkServer) -> None:
        if self.ahead:
            for kind, count in WANTED.items():
                wanted = count if kind != COMPILING or self.language else 0
                while len(self.starting[kind]) < wanted:
                    future = self._thread.submit(self._start, server, kind)
                    self.starting[kind].append((server, future))

    def close_async(self, close: Callable[[], None]) -> None:
        self._closing.append(self._thread.submit(close))

    def wait_closed(self) -> None:
        closing, self._closing = self._closing, []
        for future in closing:
            future.result()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """For the block, nothing ends, and children that are getting ready are stopped."""
        self.wait_closed()
        with ExitStack() as stopped:
            for child in self.beside:
                stopped.enter_context(child.stopped())
            for starting in self.starting.values():
                for _, future in list(starting):
                    with suppress(SandboxError):
                        stopped.enter_context(future.result().stopped())
            yield

    def settle(self) -> None:
        self.wait_closed()
        for kind, starting in self.starting.items():
            for server, _ in list(starting):
                if child := self.warm_child(server, kind):
                    ready: Future[Child] = Future()
                    ready.set_result(child)
                    starting.append((server, ready))

    def close(self) -> None:
        self.wait_closed()
        for starting in self.starting.values():
            while starting:
                with suppress(SandboxError):
                    starting.popleft()[1].result().close()

    def warm_child(self, server: ForkServer, kind: str) -> Child | None:
        """The oldest ready child of that kind that this server can use, or None."""
        if not self.starting[kind]:
            return None
        origin, starting = self.starting[kind].popleft()
        try:
            child = starting.result()
        except SandboxError:
            return None
        # One that was killed while it waited, or whose device fails: the next child will say so.
        with suppress(EvalError, ChildFailure):
            if origin is server and server.alive:
                if child.owed:
                    child.finish(PREPARE_S)
                if not child.gone:
                    return child
        child.close()
        return None

    def _child(self, server: ForkServer, kind: str) -> Child:
        if kind == COMPILING:
            return Child(server, CANDIDATE, self.config.limits, processes=True)
        return Child(server, kind, self.config.limits)

    def _start(self, server: ForkServer, kind: str) -> Child:
        child = self._child(server, kind)
        language = self.language if kind == COMPILING else None
        prepare = Prepare(device=self.device, threads=self.config.threads, language=language)
        try:
            child.begin(prepare.message())
        except (EvalError, ChildFailure) as failure:
            child.close()
            raise SandboxError(
                f"a warm {kind} process did not start: {failure}", "one is started on demand"
            ) from failure
        return child
