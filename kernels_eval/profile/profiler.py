"""Profiles correct candidates, one after the other, in confined children with deadlines. Faults
cost only the profile. A candidate can lie about its time or kernels: it runs in the measuring
process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernels_eval.compile.cubins import named
from kernels_eval.config import EvalConfig
from kernels_eval.devices import conditions
from kernels_eval.errors import KilledError
from kernels_eval.judge.prepare import Preparer
from kernels_eval.profile import ncu
from kernels_eval.profile.records import KernelProfile, OperatorTime
from kernels_eval.profile.roofline import peak_bytes_per_s, peak_flops
from kernels_eval.protocol import (
    ConfinedReplay,
    MeasurePeaks,
    ModelSpec,
    Replay,
    Request,
    RunProgram,
    TimeCandidate,
)
from kernels_eval.records import Candidate, KernelTask, Verdict
from kernels_eval.sandbox.channel import Answer, Message
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.toolchain import places_of

SEED = 0
LOG_CHARS = 300


class NotProfiled(Exception):
    """A candidate could not be profiled; the text says why."""


class Profiler(Preparer):
    """Keeps its processes: use as a context manager. `counters`: why there are no metrics."""

    def __init__(
        self,
        config: EvalConfig,
        device: str,
        *,
        timeout_s: float = 120,
        budget_s: float = 0.3,
        metrics: bool = True,
        cuda_arch: str | None = None,
    ) -> None:
        """`timeout_s`: a program's deadline; `budget_s`: about the time of calls profiled by
        operator; `metrics`: ask ncu.
        """
        super().__init__(config, cuda_arch=cuda_arch)
        self.device, self.timeout_s, self.budget_s = device, timeout_s, budget_s
        self.on_gpu = device.startswith("cuda")
        self.counters = "" if self.on_gpu else "a CPU: times and counts only"
        self.ncu = ncu.installed() if metrics and self.on_gpu else None
        if self.on_gpu and self.ncu is None:
            self.counters = ncu.MISSING if metrics else "not asked for"
        self._unknown: set[str] = set()
        self._peaks: dict[int, Message] = {}

    def profile(
        self,
        task: KernelTask,
        candidate: Candidate,
        verdict: Verdict,
        *,
        flops: int | None = None,
        bytes_min: int | None = None,
        reference: tuple[OperatorTime, ...] = (),
    ) -> KernelProfile:
        """The profile of a `correct` candidate; `flops` and `bytes_min` are its task's least,
        `reference` the reference's operator times. Raises EvalError where the machine fails.
        """
        timing = verdict.timing
        device = verdict.device or conditions(candidate.language).device
        known: Message = {
            "candidate_id": candidate.candidate_id,
            "task_id": task.task_id,
            "device": device,
            "reference_ms": timing.reference_ms if timing else None,
            "candidate_ms": timing.candidate_ms if timing else None,
            "flops": flops,
            "bytes_min": bytes_min,
            "reference_operators": reference,
        }
        try:
            known |= self.peaks(device, verdict.precision_class or "fp32", bytes_min)
            known |= self._seen(task, candidate)
            return KernelProfile.model_validate(known | {"counters": self.counters})
        except (NotProfiled, ValidationError) as error:
            problem = " ".join(str(error).split())[:LOG_CHARS] or type(error).__name__
            return KernelProfile.model_validate(known | {"problem": problem})

    def peaks(self, device_name: str, precision: str, bytes_min: int | None) -> Message:
        """`peak_flops` and `peak_bytes_per_s`: a GPU's data sheet (None: unknown), or measured on a
        CPU in the next power of two bytes.
        """
        if self.on_gpu:
            flops = peak_flops(device_name, precision)
            return {"peak_flops": flops, "peak_bytes_per_s": peak_bytes_per_s(device_name)}
        size = 1 << min(28, max(16, (bytes_min or 0).bit_length()))
        if size not in self._peaks:
            asked = MeasurePeaks(threads=self.config.threads, working_set=size)
            with Child(self.server, "peaks", self.config.limits) as child:
                self._peaks[size] = self._request(child, asked)
        return self._peaks[size]

    def _seen(self, task: KernelTask, candidate: Candidate) -> Message:
        prepared = self.prepare(candidate, task)
        if prepared.finding:
            raise NotProfiled(f"{prepared.finding.reason}: {prepared.finding.detail}")
        self.builder.cache.renew(prepared.libraries.values())
        spec = ModelSpec(
            entry_point=task.entry_point,
            init_form=task.init_form,
            device=self.device,
            construct_on=self.device,
            threads=self.config.threads,
            seed=SEED,
        )

        def replay(child: Child) -> Replay:
            return Replay(
                task=str(child.write_file("task.py", task.code)),
                candidate=str(child.write_file("candidate.py", candidate.code or "")),
                spec=spec,
                libraries=prepared.libraries,
                language=candidate.language,
            )

        with Child(self.server, "profiled", self.config.limits, processes=True) as child:
            request = TimeCandidate(replay=replay(child), budget_s=self.budget_s)
            seen = self._request(child, request)
        try:
            resources = seen.pop("resources")
            kernels = [dict(kernel) for kernel in seen["kernels"]]
            metrics = self._metrics(replay, [each["name"] for each in kernels])
            for kernel in kernels:
                kernel |= _of_cubin(str(kernel["name"]), resources)
                kernel["metrics"] = metrics.get(str(kernel["name"]), {})
        except (KeyError, TypeError, ValueError) as error:
            raise NotProfiled("its process answered with no profile") from error
        return seen | {"kernels": kernels}

    def _metrics(
        self, replay: Callable[[Child], Replay], kernels: list[str]
    ) -> dict[str, dict[str, float]]:
        if self.ncu is None or self.counters or not kernels:
            return {}
        said = ""
        for _ in range(2):  # once more without what this version does not know
            said = self._run(replay, ncu.command(self.ncu, kernels, self._unknown))
            if found := ncu.metrics_in(said):
                return found
            if not (unknown := ncu.unknown_metrics(said) - self._unknown):
                break
            self._unknown |= unknown
        self.counters = ncu.unavailable_reason(said)
        return {}

    def _run(self, replay: Callable[[Child], Replay], under: list[str]) -> str:
        cache, tool = places_of(self.builder.tools.cache), Path(under[0]).resolve().parent
        with Child(self.server, "sanitizer", self.config.limits, processes=True) as child:
            asked = ConfinedReplay(
                replay=replay(child),
                readable=list(map(str, cache)),
                tools=[str(ncu.HOME), str(tool)],
            )
            path = str(child.write_file("request.json", asked.model_dump_json()))
            program = [sys.executable, "-P", "-m", "kernels_eval.candidate.profiled", path]
            run = RunProgram(program=[*under, *program], environment=ncu.ENVIRONMENT)
            return str(self._request(child, run).get("said"))

    def _request(self, child: Child, request: Request[Any]) -> Answer:
        try:
            answer = child.request(request, self.timeout_s)
        except (ChildFailure, KilledError) as failure:
            raise NotProfiled(str(failure)) from failure
        if "error" in answer:
            raise NotProfiled(f"{answer['error']}: {answer.get('detail')}")
        return answer

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_cubin(kernel: str, resources: Mapping[str, list[float]]) -> Message:
    found = [numbers for mangled, numbers in resources.items() if named(kernel, mangled)]
    if not found:
        return {}
    registers, stack, _, local = max(found, key=lambda numbers: numbers[3])
    return {"registers": registers, "stack_bytes": stack, "local_share": local}
