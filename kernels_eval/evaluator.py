"""One candidate from source to verdict in one call, in this process."""

from __future__ import annotations

import atexit
from pathlib import Path

from kernels_eval.config import EvalConfig
from kernels_eval.devices import device_for
from kernels_eval.parent.prepare import Preparer
from kernels_eval.parent.runner import Runner
from kernels_eval.records import Candidate, KernelTask, Language, Verdict


class Evaluator:
    """Verifies candidates one after the other in this process. Keeps its fork server: use one for
    many, as a context manager.

    Raises DeviceError where the language's device is missing.
    """

    def __init__(
        self, language: Language, config: EvalConfig | None = None, *, cache: Path | None = None
    ) -> None:
        self.config = config or EvalConfig()
        device = device_for(language)
        self._preparer = Preparer(self.config, cache=cache)
        self._runner = Runner(self.config, device, cache=cache)

    def __call__(self, task: KernelTask, candidate: Candidate) -> Verdict:
        """One verdict. Raises ToolchainError and SandboxError where the machine fails."""
        return self._runner.run(task, candidate, self._preparer.prepare(candidate, task))

    def close(self) -> None:
        self._preparer.close()
        self._runner.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_kept: dict[tuple[Language, EvalConfig, Path | None], Evaluator] = {}


def evaluate(
    task: KernelTask,
    candidate: Candidate,
    config: EvalConfig | None = None,
    *,
    cache: Path | None = None,
) -> Verdict:
    """Verify one candidate. The processes behind it are kept for the next call with the same
    config, until this process ends; call it in a loop. For many candidates at once use
    `kernels_eval.Pool`.

    Raises DeviceError where the language's device is missing, ToolchainError and SandboxError where
    the machine fails.
    """
    key = (candidate.language, config or EvalConfig(), cache)
    if key not in _kept:
        _kept[key] = Evaluator(candidate.language, config, cache=cache)
        atexit.register(_kept[key].close)
    return _kept[key](task, candidate)
