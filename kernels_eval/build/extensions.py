"""Builds the C++ and CUDA extensions that candidates ask for, outside the candidate's process, into
a content-addressed cache.

Guarantees: a library is built once per (sources, flags, toolchain), as long as it is kept
(`cache`); a compiler that hangs is killed with its children, one that is killed from outside is
started again; a build that fails with the lite headers is tried again with torch's own, unless its
first error is one that torch's headers would give too, so the outcome does not depend on the tier;
a build that a full disk may have made fail has no outcome. Does not guarantee that the compiler
itself is safe against hostile input beyond a deadline, a file-size limit, a list of flags that load
or write things, and whatever `confine` adds.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path

from kernels_eval.build.attempt import Attempt, Tier
from kernels_eval.build.cache import BuildCache
from kernels_eval.build.flags import REACHES_OUT, refused_flag
from kernels_eval.build.lite import BEYOND, IDENTIFIER, certain_error, plain_text
from kernels_eval.build.prepared import SHIMS, Prepared
from kernels_eval.build.process import WorkRoot
from kernels_eval.build.spec import Build, ExtensionSpec
from kernels_eval.build.toolchain import Toolchain, default_cache
from kernels_eval.config import BuildConfig
from kernels_eval.errors import ToolchainError
from kernels_eval.records import Reason


def _refusal(spec: ExtensionSpec) -> Build | None:
    """The outcome of a spec that is not given to a compiler at all."""
    said, reason = spec.unusable_reason, Reason.BUILD_FAILED
    flags = () if said else (spec.extra_cflags, spec.extra_cuda_cflags, spec.extra_ldflags)
    refused = [bad for bad in map(refused_flag, flags) if bad is not None]
    for bad in refused[:1]:
        said = f"compiler flag not allowed: {bad[:200]!r}"
        reason = Reason.FORBIDDEN_CALL if REACHES_OUT.search(bad) else reason
    return Build(ok=False, key=spec.key, reason=reason, log=said) if said else None


class Builder:
    """Turns specs into libraries. One instance a process; any number of processes may share a cache
    directory.

    `confine` is called in every compiler process before it starts, to shut it in; it may use only
    what a preexec_fn may.
    """

    def __init__(
        self,
        config: BuildConfig,
        *,
        cache: Path | None = None,
        cuda_arch: str | None = None,
        confine: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.tools = Toolchain(cache or default_cache(), config.cuda_arch or cuda_arch or "9.0")
        self.cache = BuildCache(self.tools.cache)
        self.confine = confine
        self._work = WorkRoot(self.tools.cache)

    @property
    def work_root(self) -> Path:
        """The one folder under the cache that this process's compilers write to; it goes with the
        process."""
        return self._work.path

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared(self.tools, self._work)

    def cached(self, spec: ExtensionSpec) -> Build | None:
        return self.cache.find(self.tools.key_for(spec))

    def build(self, spec: ExtensionSpec) -> Build:
        """Build one extension, or take it from the cache. Never raises for a candidate's fault;
        ToolchainError for the machine's, DiskFullError among them."""
        started = time.monotonic()
        if known := self.cached(spec) or _refusal(spec):
            return known
        if spec.uses_cuda and not self.tools.nvcc:
            raise ToolchainError(
                "a CUDA extension needs nvcc, and none was found",
                "install the CUDA toolkit and set CUDA_HOME",
            )
        with ExitStack() as scratch:
            build = self.cache.with_room(lambda: self._compiled(spec, scratch))
            build = build.model_copy(update={"seconds": time.monotonic() - started})
            return self.cache.store(self.tools.key_for(spec), build) if build.lasting else build

    def _compiled(self, spec: ExtensionSpec, scratch: ExitStack) -> Build:
        """The outcome, with a library in a folder that goes with `scratch`. Raises OSError or
        DiskFullError for a full disk."""
        scratch.close()  # the files of a first attempt take room as well
        directory = tempfile.TemporaryDirectory(prefix="build-", dir=self.work_root)
        folder = Path(scratch.enter_context(directory))
        if self.config.lite_headers and self.lite_can(spec):
            build = self.attempt(spec, "lite", folder).build()
            if build.ok or not build.lasting or self.is_certain(build, spec):
                return build
        return self.attempt(spec, "full", folder).build()

    def attempt(self, spec: ExtensionSpec, tier: Tier, folder: Path) -> Attempt:
        """A build with one header tier, in a new folder below `folder`."""
        return Attempt(
            spec, tier, folder / tier, self.prepared, self.config.timeout_s, self.confine
        )

    def lite_can(self, spec: ExtensionSpec) -> bool:
        """Whether to try lite: not for sources that bind themselves, or name what only torch's
        whole header has."""
        text = plain_text(spec.text)
        return (
            spec.kind == "inline"
            and bool(spec.functions)
            and spec.python_module
            and not BEYOND.search(text)
            and self.prepared.only_torchs.isdisjoint(IDENTIFIER.findall(text))
        )

    def is_certain(self, build: Build, spec: ExtensionSpec) -> bool:
        """Whether torch's own headers would certainly reject this source as well."""
        undefined = self.tools.nvcc and re.match(r"cuda\.cu\(\d+\): error: identifier ", build.log)
        names = self.prepared.torch_names_of_nvcc if undefined else self.prepared.torch_names
        return certain_error(build.log, spec.text, names)

    def warm(self, share: int = 0, shares: int = 1) -> None:
        """Make what most builds need, so that no candidate waits for it. Builders divide the work:
        each takes its share. Raises ToolchainError.
        """
        made = self.prepared
        jobs: list[tuple[int, Callable[[], object]]] = [  # with seconds, as measured on one core
            (16, partial(made.shim, SHIMS[1])),
            (12, partial(made.shim, SHIMS[0])),
            (7, lambda: made.only_torchs),
            (2, made.common),
        ]
        if self.tools.nvcc:
            jobs += [(4, made.bindings), (1, made.launches)]
        loads = [0] * shares
        for seconds, job in sorted(jobs, key=lambda pair: -pair[0]):
            least = loads.index(min(loads))
            loads[least] += seconds
            if least == share:
                self.cache.with_room(job)
