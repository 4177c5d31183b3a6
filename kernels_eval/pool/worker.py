"""Ray actors: a `KernelWorker` per lane of a GPU (or CPU slot), and `BuildWorker`s on CPU cores. A
killed role is a KilledError; two failed health checks raise GpuLostError."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kernels_eval.config import EvalConfig
from kernels_eval.devices import gpu_uuid
from kernels_eval.errors import EvalError
from kernels_eval.evaluator import Evaluator
from kernels_eval.judge import memory_errors
from kernels_eval.judge.messages import Prepared
from kernels_eval.judge.prepare import Preparer
from kernels_eval.judge.turns import turns_file
from kernels_eval.protocol import HealthReport
from kernels_eval.records import Candidate, KernelTask, Reason, Verdict
from kernels_eval.sandbox.deaths import blaming
from kernels_eval.sandbox.health import DeviceHealth, check_health

BLAMES_THE_DEVICE = frozenset({Reason.CUDA_ERROR, Reason.CRASHED, Reason.LOAD, Reason.RUN})
"""Reasons that a broken GPU produces too: such a verdict stands once a health check has passed."""


GIVES_WAY = 3
"""Niceness of compilers while each worker's next work is built: where others leave too few cores,
what times kernels goes before them, by two to one."""


class BuildWorker:
    """Screens and builds candidates on one CPU core."""

    def __init__(
        self, config: EvalConfig, cuda_arch: str | None, share: int = 0, shares: int = 1
    ) -> None:
        self._config = config
        self._preparer = Preparer(config, cuda_arch=cuda_arch)
        self._share = (share, shares)
        self._warm = False

    def build(
        self,
        task: KernelTask,
        candidate: Candidate,
        prepared: Prepared | None = None,
        blamed: frozenset[str] = frozenset(),
        gives_way: bool = False,
    ) -> Prepared:
        """What is prepared, with the build that a run `asked` for. `blamed`: roles whose next death
        is the candidate's; `gives_way`: whether no worker waits for it.
        """
        self._preparer.builder.niceness = GIVES_WAY if gives_way else 0
        with blaming(blamed):
            if not (self._warm or candidate.language.jit):
                self._preparer.builder.warm(*self._share, cuda=candidate.language.needs_gpu)
                self._warm = True
            if prepared is None:
                return self._preparer.prepare(candidate, task)
            return self._preparer.add_build(candidate, prepared)


class InstrumentingBuildWorker(BuildWorker):
    """Builds candidates that were right before with sanitizers, too: the worker that judges them,
    which alone is busy by then, finds that in the cache."""

    def build(
        self,
        task: KernelTask,
        candidate: Candidate,
        prepared: Prepared | None = None,
        blamed: frozenset[str] = frozenset(),
        gives_way: bool = False,
    ) -> Prepared:
        made = super().build(task, candidate, prepared, blamed, gives_way)
        if made.finding is None and memory_errors.wanted(self._config, candidate, made.tier):
            with suppress(EvalError):  # which the worker that judges meets again
                for spec in made.specs:
                    self._preparer.builder.build(memory_errors.instrumented(spec))
        return made


class KernelWorker:
    """Runs prepared candidates on one device, one of `lanes` that share it. `check` replaces the
    health check in tests.
    """

    def __init__(
        self,
        config: EvalConfig,
        device: str,
        cuda_arch: str | None,
        check: Callable[..., HealthReport] | None = None,
        lanes: int = 1,
    ) -> None:
        self._neighbours = lanes - 1
        file = turns_file(gpu_uuid() or device) if lanes > 1 else None
        self._evaluator = Evaluator(device, config, cuda_arch=cuda_arch, turns_file=file)
        self._runner = runner = self._evaluator.runner
        runner.start()  # it takes seconds, in which the first candidates are built
        runner.warm_pool.replenish(runner.server)
        self._health: DeviceHealth | None = None
        if check or device.startswith("cuda"):
            self._health = DeviceHealth(
                lambda: runner.server,
                device,
                config.limits,
                runner.drop_reference,
                runner.close,
                check or check_health,
            )

    def run(
        self,
        task: KernelTask,
        candidate: Candidate,
        prepared: Prepared,
        blamed: frozenset[str] = frozenset(),
    ) -> Verdict | Prepared:
        """One verdict, or what the builders must add first. Raises GpuLostError where the device
        fails, other EvalErrors where the machine does.
        """
        self._runner.neighbours = 0 if prepared.alone else self._neighbours
        with blaming(blamed), self._runner.turns.shared():
            if self._health:
                self._health.remember()
            config = self._evaluator.config
            if prepared.finding is None and memory_errors.wanted(config, candidate, prepared.tier):
                memory_errors.begin(self._runner)
            found = self._evaluator.run_once(task, candidate, prepared)
            suspect = isinstance(found, Verdict) and found.reason in BLAMES_THE_DEVICE
            if self._health and suspect:
                self._health.confirm(crowded=bool(self._neighbours))
            return found

    def vacate(self) -> None:
        """Give back the device's memory that is kept for the next candidate."""
        with self._runner.turns.shared():
            self._runner.drop_reference()
            self._runner.warm_pool.wait_closed()
