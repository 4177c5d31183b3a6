"""One candidate from source to verdict: the protocol, in the order it happens.

`Preparer` is the build side (no device), `Runner` the device side; `evaluate` is both in one call. Guarantees: every candidate gets
exactly one verdict, whatever its code does; an exception from here means that the machine failed, not the kernel.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError

from kernels_eval.build.extensions import Builder
from kernels_eval.build.spec import ExtensionSpec
from kernels_eval.checks import correctness as checks
from kernels_eval.checks.screening import screen
from kernels_eval.checks.timing import ImplausibleTime, measure
from kernels_eval.config import EvalConfig
from kernels_eval.errors import DeviceError
from kernels_eval.isolation.sandbox import Child, ChildFailure, ForkServer
from kernels_eval.records import STATUS_OF, Candidate, Correctness, KernelTask, Language, Record, Verdict

LOG_BYTES = 8192


class Finding(Record):
    """The end of a verification that did not get to `correct`: a reason (which fixes the status), a detail, a log."""

    reason: str
    detail: str = ""
    log: str = ""


MAX_EXTENSIONS = 16
MAY_CLAIM = frozenset(
    """exception cuda_error out_of_memory undefined_symbol no_module syntax_error build_failed forbidden_call build
    missing_model_new""".split()
)
"""Reasons that a candidate's process may give for an error of its own. Never `ok`, never the reference's."""


class OutputForm(Record):
    """Shape and dtype of one output tensor."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    shape: list[int]
    dtype: str


class Notice(Record):
    """What the candidate's process says of one call. Testimony: its form is checked here, its outputs by the reference's side."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    kinds: list[str] = []
    plain: bool = False
    tensors: bool = False
    structure: str = ""
    custom_calls: int = 0
    mutated: bool = False
    previous_changed: bool = False
    outputs: list[OutputForm] = []


class Seen(Record):
    """Operators and custom kernels that the candidate's process saw."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    operators: list[str] = []
    custom: list[str] = []


def _testimony(model: type[Any], answer: dict[str, Any]) -> Any:
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise Stop(
            "exited_early", f"the process answered with something that the protocol does not know: {_one_line(str(error))[:200]}"
        ) from error


def _spec(answer: Any) -> ExtensionSpec:
    return _testimony(ExtensionSpec, answer)


class Stop(Exception):
    """Raised inside the protocol when the verdict is known."""

    def __init__(self, reason: str, detail: str = "", log: str = "") -> None:
        super().__init__(reason)
        self.finding = Finding(reason=reason, detail=detail[:2000], log=log)


class Prepared(Record):
    """What the build side found: libraries for the run side, or the finding that ends the verification."""

    candidate_id: str
    libraries: dict[str, str] = {}
    finding: Finding | None = None
    flags: tuple[str, ...] = ()
    tier: str | None = None
    cached: bool = False
    seconds: float = 0.0


class Preparer:
    """Screens candidates, reads their build requests in a sandboxed process, and builds them. Needs no device."""

    def __init__(self, config: EvalConfig, *, cache: Path | None = None, cuda_arch: str | None = None) -> None:
        self.config = config
        self.builder = Builder(config.build, cache=cache, cuda_arch=cuda_arch)
        self._server: ForkServer | None = None

    @property
    def server(self) -> ForkServer:
        if self._server is None or not self._server.alive:
            self._server = ForkServer(threads=self.config.threads)
        return self._server

    def prepare(self, candidate: Candidate) -> Prepared:
        started = time.monotonic()
        flags: tuple[str, ...] = ()
        builds = []
        try:
            if candidate.code is None:
                raise Stop(candidate.parse_reason or "no_code_block", "the response holds no complete module")
            screened = screen(candidate.code)
            flags = screened.flags
            if screened.reason:
                raise Stop(screened.reason, screened.detail)
            if candidate.language is not Language.TRITON:
                for spec in self._capture(candidate.code):
                    build = self.builder.build(spec)
                    builds.append(build)
                    if not build.ok:
                        raise Stop(build.reason, _first_line(build.log) or "the build failed", build.log)
        except Stop as stop:
            finding: Finding | None = stop.finding
        else:
            finding = None
        return Prepared(
            candidate_id=candidate.candidate_id,
            libraries={b.key: b.path for b in builds if b.ok},
            finding=finding,
            flags=flags,
            tier=next((tier for tier in ("full", "slim") if any(b.tier == tier for b in builds)), None),
            cached=bool(builds) and all(b.cached for b in builds),
            seconds=time.monotonic() - started,
        )

    def _capture(self, code: str) -> list[ExtensionSpec]:
        if "load" not in code:
            return []
        with Child(self.server, "capture", self.config.limits) as child:
            path = child.scratch / "candidate.py"
            path.write_text(code, encoding="utf-8", errors="replace")
            try:
                answer = child.request("capture", path=str(path), timeout=self.config.build.capture_timeout_s)
            except ChildFailure as failure:
                raise Stop("load" if failure.reason == "run" else failure.reason, failure.detail, child.log_tail(LOG_BYTES)) from failure
            asked = answer.get("specs", [])
            specs = [_spec(spec) for spec in asked[:MAX_EXTENSIONS]] if isinstance(asked, list) else []
            if not specs and answer.get("error") in ("no_module", "syntax_error"):
                raise Stop(answer["error"], answer.get("detail", ""), child.log_tail(LOG_BYTES))
            return specs

    def close(self) -> None:
        if self._server:
            self._server.close()


@dataclass
class _Trial:
    """One comparison: which inputs, with which weights."""

    name: str
    seed: int
    distribution: str
    weights_seed: int | None = None
    in_place: bool = False


class Runner:
    """Runs built candidates on one device. Owns a fork server and the reference process of the task at hand."""

    def __init__(self, config: EvalConfig, device: str, *, cache: Path | None = None, cuda_arch: str | None = None) -> None:
        self.config, self.device = config, device
        self.builder = Builder(config.build, cache=cache, cuda_arch=cuda_arch)
        self._server: ForkServer | None = None
        self._reference: _ReferenceProcess | None = None

    @property
    def server(self) -> ForkServer:
        if self._server is None or not self._server.alive:
            self._drop_reference()
            self._server = ForkServer(threads=self.config.threads)
        return self._server

    def run(self, task: KernelTask, candidate: Candidate, prepared: Prepared) -> Verdict:
        """The verdict of one prepared candidate. Raises EvalError only where the machine fails."""
        started = time.monotonic()
        facts: dict[str, Any] = {}
        try:
            if prepared.finding:
                raise Stop(prepared.finding.reason, prepared.finding.detail, prepared.finding.log)
            self._check(task, candidate, prepared, facts)
            finding = Finding(reason="ok")
        except Stop as stop:
            finding = stop.finding
        facts["isolation"] = self._server.isolation if self._server else ()
        return verdict_of(task, candidate, prepared, finding, run_s=time.monotonic() - started, **facts)

    # -- the protocol --------------------------------------------------------------------------------------------------------------

    def _check(self, task: KernelTask, candidate: Candidate, prepared: Prepared, facts: dict[str, Any]) -> None:
        reference = self._reference_for(task)
        facts.update(device=reference.device_name, reference_operators=reference.operators)
        with Child(self.server, "candidate", self.config.limits, reference.output_bytes) as child:
            process = _CandidateProcess(child, self.builder, self.config, facts)
            process.load(task, candidate, reference, prepared.libraries, self.device)
            self._compare_all(reference, process, facts)
            self._custom_kernel(process, facts)
            if self.config.time_correct:
                self._time(reference, process, facts)

    def _compare_all(self, reference: _ReferenceProcess, process: _CandidateProcess, facts: dict[str, Any]) -> None:
        """Every trial: right outputs, for unseen inputs, other distributions, reused storage and other weights."""
        facts["outputs_match"] = False
        measured, outcomes = [], []
        for trial in reference.trials:
            if trial.weights_seed is not None and process.parameters != reference.parameters:
                facts["flags"] = (*facts.get("flags", ()), "weights_not_mappable")
                continue
            result = process.call(trial, reference)
            measured.append(result)
            outcomes.append((trial, checks.judge(result, reference.precision, self.config.correctness), result))
            facts["correctness"] = _correctness(measured, [r for t, _, r in outcomes if t.distribution == "declared"], reference)
            if outcomes[-1][1] != "ok":
                break
        trial, outcome, result = outcomes[-1]
        if outcome != "ok":
            raise Stop(*_explain(trial, outcome, result, process.notices))
        facts["outputs_match"] = True
        facts["precision_class"] = reference.precision
        _raise_for_notices(process.notices, reference)

    def _custom_kernel(self, process: _CandidateProcess, facts: dict[str, Any]) -> None:
        seen: Seen = _testimony(Seen, process.ask("operators", seed=secrets.randbits(31)))
        facts["custom_kernels"] = tuple(_one_line(name)[:200] for name in seen.custom[:32])
        facts["library_calls"] = tuple(_one_line(name)[:200] for name in seen.operators[:64])
        idle = [notice for notice in process.notices if not notice.custom_calls]
        if idle:
            calls = ", ".join(facts["library_calls"][:6]) or "no operator at all"
            share = f"{len(idle)} of {len(process.notices)} calls"
            raise Stop("no_custom_kernel", f"no custom kernel ran in {share}; the work was done by {calls}")

    def _time(self, reference: _ReferenceProcess, process: _CandidateProcess, facts: dict[str, Any]) -> None:
        seeds = [secrets.randbits(31) for _ in range(3)]
        reference.ask("timing_inputs", seeds=seeds)
        process.ask("timing_inputs", seeds=seeds)
        try:
            timing = measure(
                lambda calls: reference.ask("sample", calls=calls)["ns"],
                lambda calls: _nanoseconds(process.ask("sample", calls=calls)),
                self.config.timing,
                cpu_clock=None if self.device.startswith("cuda") else process.child.cpu_clock(),
            )
        except ImplausibleTime as error:
            raise Stop("implausible_time", str(error)) from error
        # Right in the first calls is not enough: the same check once more, after the clock has stopped.
        after = process.call(reference.after, reference)
        outcome = checks.judge(after, reference.precision, self.config.correctness)
        if outcome != "ok":
            facts["outputs_match"] = False
            raise Stop(*_explain(reference.after, outcome, after, process.notices))
        _raise_for_notices(process.notices, reference)
        facts["timing"] = timing

    # -- the reference -------------------------------------------------------------------------------------------------------------

    def _reference_for(self, task: KernelTask) -> _ReferenceProcess:
        server = self.server
        if self._reference is None or self._reference.task != task or self._reference.child.dead:
            self._drop_reference()
            self._reference = _ReferenceProcess(server, task, self.config, self.device)
        self._reference.open()
        return self._reference

    def _drop_reference(self) -> None:
        if self._reference:
            self._reference.close()
            self._reference = None

    def close(self) -> None:
        self._drop_reference()
        if self._server:
            self._server.close()


class _ReferenceProcess:
    """The trusted process of one task: its model, expected values under secret seeds, and its side of the stopwatch."""

    def __init__(self, server: ForkServer, task: KernelTask, config: EvalConfig, device: str) -> None:
        self.task, self.config, self.device = task, config, device
        self.child = Child(server, "reference", config.limits)
        self.path = self.child.scratch / "task.py"
        self.path.write_text(task.code, encoding="utf-8", errors="replace")
        self.seed = secrets.randbits(31)
        self.failure: Stop | None = None
        self.trials: list[_Trial] = []

    def open(self) -> None:
        """Load the task and compute the expected values, once; afterwards repeat what came of it. Raises Stop with a task_error."""
        if self.failure:
            raise self.failure
        if self.trials:
            return
        try:
            self._load()
            self._expect()
        except Stop as stop:
            self.failure = stop
            raise

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer = self.child.request(command, timeout=self.config.limits.reference_s, **arguments)
        except ChildFailure as failure:
            raise Stop("reference_failed", f"the reference: {failure.detail}", self.child.log_tail(LOG_BYTES)) from failure
        if "error" in answer:
            raise Stop("reference_failed", f"the reference: {answer['detail']}", answer.get("trace", ""))
        return answer

    def _load(self) -> None:
        task = self.task
        loaded = self.ask(
            "load", path=str(self.path), entry_point=task.entry_point, init_form=task.init_form, device=self.device,
            threads=self.config.threads, seed=self.seed, oracle_max_bytes=self.config.correctness.oracle_max_bytes,
        )  # fmt: skip
        self.plan, self.outputs, self.structure = loaded["plan"], loaded["outputs"], loaded["structure"]
        self.mutates, self.parameters = loaded["mutates"], loaded["parameters"]
        self.operators = tuple(loaded["operators"])
        self.precision = checks.PRECISION_OF.get(loaded["precision"], "fp32")
        self.device_name = loaded["device_name"]
        self.output_bytes = sum(output["bytes"] for output in self.outputs)

    def _expect(self) -> None:
        wanted = [_Trial(name, secrets.randbits(31), name) for name in self.config.correctness.distributions]
        wanted.append(_Trial("in_place", secrets.randbits(31), "declared", in_place=True))
        if self.parameters:  # the same inputs as "declared": an answer that ignores the new weights is then recognised
            wanted.append(_Trial("other_weights", wanted[0].seed, "declared", weights_seed=secrets.randbits(31)))
        after = _Trial("after_timing", secrets.randbits(31), "declared", in_place=True)
        if any(note["vary"] for note in self.plan):
            wanted = [*wanted, after]
        else:
            wanted = [*(trial for trial in wanted if trial.distribution == "declared"), after]
        wanted = self._affordable(wanted)
        seen = {trial.name: self._expected(trial) for trial in wanted}
        if seen[after.name] is None or seen["declared"] is None:
            raise Stop("degenerate_task", "the reference's output on its own inputs holds no finite number")
        known = [s for s in seen.values() if s]
        if len(known) > 2 and all(s["same_as_all_others"] for s in known[1:]):
            raise Stop("degenerate_task", "the reference's output is the same for all inputs")
        self.trials = [trial for trial in wanted if seen[trial.name] and trial is not after]
        self.after = after
        self.oracle = "float64" if all(s["oracle"] == "float64" for s in known) else "float32"

    def _affordable(self, wanted: list[_Trial]) -> list[_Trial]:
        """Expected values are kept for all trials: where outputs are huge, the varied distributions are the first to go."""
        keep = max(4, int(self.config.correctness.expected_max_bytes // max(3 * self.output_bytes, 1)))
        varied = [trial for trial in wanted if trial.distribution != "declared"]
        surplus = set(id(trial) for trial in varied[max(0, keep - (len(wanted) - len(varied))) :])
        return [trial for trial in wanted if id(trial) not in surplus]

    def _expected(self, trial: _Trial) -> dict[str, Any] | None:
        """One trial's expected values; None where this distribution does not suit the task. Raises Stop on the task's own inputs."""
        declared = trial.distribution == "declared"
        try:
            seen = self.ask("expect", trial=trial.name, seed=trial.seed, distribution=trial.distribution, weights_seed=trial.weights_seed)
        except Stop:
            if declared or self.child.dead:
                raise
            return None
        if declared and not seen["deterministic"]:
            raise Stop("degenerate_task", "two runs of the reference on the same inputs differ")
        return seen if seen["finite"] or (declared and seen["some_finite"]) else None

    def close(self) -> None:
        self.child.close()


class _CandidateProcess:
    """The parent's handle on the process that runs the kernel."""

    def __init__(self, child: Child, builder: Builder, config: EvalConfig, facts: dict[str, Any]) -> None:
        self.child, self.builder, self.config, self.facts = child, builder, config, facts
        self.notices: list[Notice] = []
        self.parameters: Any = []

    def load(self, task: KernelTask, candidate: Candidate, reference: _ReferenceProcess, libraries: dict[str, str], device: str) -> None:
        path, task_path = self.child.scratch / "candidate.py", self.child.scratch / "task.py"
        path.write_text(candidate.code or "", encoding="utf-8", errors="replace")
        task_path.write_text(task.code, encoding="utf-8", errors="replace")
        answer = self._request(
            "load", self.config.limits.load_s, "load", path=str(path), task_path=str(task_path), entry_point=task.entry_point,
            init_form=task.init_form, device=device, threads=self.config.threads, seed=reference.seed, plan=reference.plan,
            libraries=libraries, language=candidate.language.value,
        )  # fmt: skip
        self.parameters = answer.get("parameters", [])

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self._request(command, self.config.limits.run_s, "run", **arguments)

    def _request(self, command: str, timeout: float, deadline: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer = self.child.request(command, timeout=timeout, **arguments)
            while "build" in answer:
                answer = self._late_build(answer["build"], timeout)
        except ChildFailure as failure:
            raise Stop(deadline if failure.reason == "run" else failure.reason, failure.detail, self.child.log_tail(LOG_BYTES)) from failure
        if "error" in answer:
            claimed = answer["error"]
            reason = claimed if isinstance(claimed, str) and claimed in MAY_CLAIM else "exception"
            raise Stop(reason, str(answer.get("detail", "")), f"{answer.get('trace', '')}\n{self.child.log_tail(LOG_BYTES // 2)}")
        return answer

    def _late_build(self, spec: Any, timeout: float) -> dict[str, Any]:
        """Build what a constructor or a first call asks for; the child waits, its deadline does not run."""
        build = self.builder.build(_spec(spec))
        self.facts["late_tier"] = build.tier or None
        return self.child.resume({"ok": build.ok, "path": build.path, "reason": build.reason, "log": build.log}, timeout)

    def call(self, trial: _Trial, reference: _ReferenceProcess) -> dict[str, Any]:
        """One forward call, compared. Raises Stop where the outputs are not even of the right form."""
        if trial.weights_seed is not None:
            self.ask("weights", seed=trial.weights_seed)
        answer = self.ask("call", seed=trial.seed, distribution=trial.distribution, in_place=trial.in_place)
        notice: Notice = _testimony(Notice, answer)
        self.notices.append(notice)
        if trial.weights_seed is not None:
            self.ask("rebuild")
        if not notice.plain:
            kind = notice.kinds[0] if notice.kinds else "nothing"
            raise Stop("lazy_output" if notice.tensors and notice.kinds else "wrong_shape", f"returns {kind}, not a plain tensor")
        _check_form(notice, reference)
        return reference.ask("compare", trial=trial.name, path=str(self.child.exchange_path), sizes=[o["bytes"] for o in reference.outputs])


def verdict_of(task: KernelTask, candidate: Candidate, prepared: Prepared, finding: Finding, **facts: Any) -> Verdict:
    """The record of a finding. Also what the pool uses for candidates that never reach a device."""
    return Verdict(
        candidate_id=candidate.candidate_id,
        task_id=task.task_id,
        language=candidate.language,
        status=STATUS_OF[finding.reason],
        reason=finding.reason,
        detail=_one_line(finding.detail),
        log_tail=finding.log[-LOG_BYTES:].encode("utf-8", "replace").decode(),  # a lone surrogate can be neither stored nor shown
        flags=(*prepared.flags, *facts.pop("flags", ())),
        build_tier=facts.pop("late_tier", None) or prepared.tier,
        build_cached=prepared.cached,
        build_s=prepared.seconds,
        **facts,
    )


# -- what a finding says ---------------------------------------------------------------------------------------------------------------


def _check_form(notice: Notice, reference: _ReferenceProcess) -> None:
    outputs, expected = notice.outputs, reference.outputs
    shapes, wanted = [o.shape for o in outputs], [o["shape"] for o in expected]
    if shapes != wanted:
        raise Stop("wrong_shape", f"returns {shapes}, the reference {wanted}")
    if notice.structure != reference.structure:
        raise Stop("wrong_shape", f"returns the structure {notice.structure}, the reference {reference.structure}")
    dtypes, wanted_dtypes = [o.dtype for o in outputs], [o["dtype"] for o in expected]
    if dtypes != wanted_dtypes:
        raise Stop("wrong_dtype", f"returns {dtypes}, the reference {wanted_dtypes}")


def _explain(trial: _Trial, outcome: str, result: dict[str, Any], notices: list[Notice]) -> tuple[str, str]:
    """The reason and one line for an output that is not the reference's, in the light of how it was obtained."""
    seen = f"relative RMS error {result['rms']:.2e}, worst element {result['max']:.2e} on {trial.name} inputs"
    if trial.weights_seed is not None and "declared" in result.get("equals_trial", ()):
        return "stale_weights", f"right for the weights seen at construction only; {seen}"
    if result.get("equals_trial"):
        return "stale_cache", f"returns the answer of an earlier call ({result['equals_trial'][0]}) for new inputs; {seen}"
    if any(notice.previous_changed for notice in notices):
        return "output_aliased", f"a later call overwrites an earlier output; {seen}"
    return outcome, seen


def _raise_for_notices(notices: list[Notice], reference: _ReferenceProcess) -> None:
    if any(notice.previous_changed for notice in notices):
        raise Stop("output_aliased", "a later call overwrites the output of an earlier one")
    if any(notice.mutated for notice in notices) and not reference.mutates:
        raise Stop("input_mutated", "the inputs are changed in place; the reference leaves them alone")


def _correctness(measured: list[dict[str, Any]], declared: list[dict[str, Any]], reference: _ReferenceProcess) -> Correctness:
    """The worst over all trials; KernelBench's tolerances over the trials on the task's own inputs, which is where they belong."""
    worst, own = checks.merge(measured), checks.merge(declared)
    return Correctness(
        trials=len(measured), rms_error=worst["rms"], reference_rms_error=worst["reference_rms"], max_error=worst["max"],
        kernelbench_1e4=own["kernelbench_1e4"], kernelbench_1e2=own["kernelbench_1e2"], oracle=reference.oracle,
    )  # fmt: skip


def _nanoseconds(answer: dict[str, Any]) -> int:
    value = answer.get("ns")
    if not isinstance(value, int):
        raise Stop("implausible_time", "the sample's time is not a number")
    return value


def _first_line(log: str) -> str:
    return next((line.strip() for line in log.splitlines() if line.strip()), "")


def _one_line(text: str) -> str:
    """Candidate text as data: one line, no control characters, bounded."""
    return "".join(c if c.isprintable() else " " for c in text)[:500].strip()


# -- one call --------------------------------------------------------------------------------------------------------------------------


def device_for(language: Language) -> str:
    """The device a language runs on. Raises DeviceError where it is not there."""
    if not language.needs_gpu:
        return "cpu"
    from kernels_eval.worker import visible_gpus

    if not visible_gpus():
        raise DeviceError(
            f"{language.value} kernels need an NVIDIA GPU, and none is visible here",
            "run on a machine with a GPU (nvidia-smi must list it), or use --language cpp",
        )
    return "cuda:0"


def evaluate(task: KernelTask, candidate: Candidate, config: EvalConfig | None = None, *, cache: Path | None = None) -> Verdict:
    """Verify one candidate in this process's own workers. For many candidates use `kernels_eval.pool`.

    Raises DeviceError where the language's device is missing, ToolchainError and SandboxError where the machine fails.
    """
    config = config or EvalConfig()
    device = device_for(candidate.language)
    preparer = Preparer(config, cache=cache)
    try:
        prepared = preparer.prepare(candidate)
    finally:
        preparer.close()
    runner = Runner(config, device, cache=cache)
    try:
        return runner.run(task, candidate, prepared)
    finally:
        runner.close()
