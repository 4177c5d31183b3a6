"""An ablation whose samples are there and whose models are quick: real plans, curation, snapshots,
scores and MLflow, without a device.

What is replaced is what needs one: training writes a log and an adapter by its seed and its rows,
models answer by name, verdicts are a function of the answer. All that the stages themselves do
around it is theirs.
"""

import json
import logging
import threading
from collections import Counter
from pathlib import Path

import pytest
import yaml

from kernels_eval.config import EvalConfig
from kernels_eval.errors import EvalError
from kernels_eval.records import Language, Timing, Verdict, stable_hash
from tasks.store.snapshot import ADAPTER, SnapshotRef
from tasks.synthesis.sampler import Response, Sampler
from tasks.training.stage import HISTORY
from tests.support.cases import cases
from tests.support.curated import line, sample
from tests.support.pools import PoolAlone
from tests.support.samples import FUSION, SINGLE

CASES = cases("flows")

PROFILE = CASES["ablation_profile"]
PROTOCOL = {"protocol": EvalConfig().model_dump(mode="json"), "device": ""}


def samples(root, tasks=6, **facts):
    """Verdicts of samples of which concur, random and min_length take different ones. Returns the
    verification snapshot."""
    rows = []
    for number in range(tasks):
        ops = SINGLE if number % 2 else FUSION
        for index, (tokens, speedup) in enumerate(
            ((100 + number, 2.0), (300, 6.5), (50, 0.5), (70, None))
        ):
            rows.append(sample(f"task{number}", index, tokens, speedup, ops=ops, **facts))
    curated = line(root, rows, **PROTOCOL)
    verdicts = SnapshotRef(
        root=str(root), stage="verification", fingerprint=curated.open().manifest["upstream"][0]
    )
    manifest = Path(verdicts.open().path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"language": "cpp"}))
    return verdicts


class Quick:
    """What replaced the devices, and what they were asked to do."""

    def __init__(self):
        self.trained = Counter()
        self.answered = Counter()
        self.judged = Counter()
        """Candidates that workers were asked for, by level."""
        self.broken = set()
        """(strategy, seed) whose training fails."""
        self.at_once = self.most_at_once = 0
        self.meet = None
        """Where the first trainings wait for each other."""
        self._lock = threading.Lock()

    def train(self, curated, recipe, prompts):
        from tasks.training.stage import planned

        snapshot = planned(curated, recipe, prompts)
        if snapshot.finished:
            return snapshot.ref
        strategy = curated.open().manifest["config"]["strategy"]
        with self._lock:
            self.trained[f"{strategy} seed {recipe.seed}"] += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if (meet := self.meet) and (strategy, recipe.seed) not in self.broken:
                meet.wait(timeout=300)
                self.meet = None
            if (strategy, recipe.seed) in self.broken:
                raise EvalError(
                    f"the device fell off the bus\x1b[31m\nwhile {strategy}", "put it back"
                )
            rows = [
                {"step": step, "epoch": step / 2, "loss": 3.0 / step, "held_out_loss": 4.0 / step}
                for step in (1, 2, 3, 4)
            ]
            snapshot.append(
                [{name: row.get(name) for name in HISTORY.names} for row in rows], HISTORY
            )
            adapter = snapshot.local_dir("adapter")
            (adapter / "adapter_config.json").write_text(
                json.dumps({"r": 8, "seed": recipe.seed, "set": curated.fingerprint})
            )
            (snapshot.local_dir() / ADAPTER).touch()
            extra = {
                "loss_first": 3.0,
                "loss_last": 0.875,
                "seconds": 0.5,
                "tokens": 4000,
                "steps": 4,
                "base_model": "small",
            }
            return snapshot.publish(
                config=recipe, upstream=[curated.fingerprint], rows=4, extra=extra
            ).ref
        finally:
            with self._lock:
                self.at_once -= 1

    def sampler(self, config, root, adapter=None):
        from tasks.synthesis.sampler import model_name

        name = model_name(config.model, adapter)
        with self._lock:
            self.answered[name] += 1
        return Answering(name)


class Answering(Sampler):
    """A sampler whose answers are all different."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def sample(self, requests):
        for request in requests:
            code = f"# {request.request_key}\nclass ModelNew(Model):\n    pass\n"
            yield Response(
                request_key=request.request_key,
                text=f"hm</think>\n```python\n{code}```",
                finish_reason="stop",
            )


class Judging(PoolAlone):
    """A pool whose verdicts are a coin thrown by the candidate's code. `judged` counts candidates
    by level."""

    def __init__(self, level="confirm", judged=None):
        super().__init__()
        self.level, self.judged = level, judged if judged is not None else Counter()

    def verify(self, pairs):
        for task, candidate in pairs:
            right = int(stable_hash(candidate.code), 16) % 2 == 0
            facts = {"status": "incorrect", "reason": "wrong_output"}
            if right:
                bounds = {
                    "speedup_lower": 7.6,
                    "speedup_upper": 8.4,
                    "pairs": 9,
                    "calls_per_sample": 1,
                    "clock_bound_ms": 1,
                }
                timing = Timing(reference_ms=8, candidate_ms=1, speedup=8, **bounds)
                facts = {
                    "status": "correct",
                    "reason": "ok",
                    "timing": timing,
                    "custom_kernels": ("k",),
                    "outputs_match": True,
                }
            self.judged[candidate.candidate_id, self.level] += 1
            verdict = Verdict(
                level=self.level,
                candidate_id=candidate.candidate_id,
                task_id=task.task_id,
                language=Language.CPP,
                **facts,
            )
            self.telemetry.reached(verdict)
            yield verdict


@pytest.fixture
def devices(monkeypatch):
    """What needs a device is replaced; flows and tasks are Prefect's."""
    from flows.ablation import branches
    from tasks.synthesis import stage as synthesis
    from tasks.training import step as training
    from tasks.verification import stage as verification

    made = Quick()
    monkeypatch.setattr(training.train, "fn", made.train)
    monkeypatch.setattr(synthesis, "make_sampler", made.sampler)
    monkeypatch.setattr(
        verification.Verification,
        "pool",
        lambda self: Judging(self.config.protocol.level, made.judged),
    )
    monkeypatch.setattr(branches, "start_ray", lambda address: None)
    return made


@pytest.fixture
def quick(devices, monkeypatch):
    """No Prefect either: flows and tasks are called as the functions that they are."""
    import flows.ablation.flow as ablations
    from flows import confirm, refresh
    from flows.ablation import branch, branches
    from tasks.verification import confirmation
    from tasks.verification import stage as verification

    monkeypatch.setattr(confirm, "verify", verification.run)
    monkeypatch.setattr(confirm, "confirm", confirmation.run)
    for module in (ablations, branch, confirm, refresh):
        monkeypatch.setattr(module, "call_stage", lambda step, *of: getattr(step, "fn", step)(*of))
    monkeypatch.setattr(branches, "run_branch", ended_state)
    for module in (ablations, branches):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("ablation"))
    for name in ("markdown", "table"):
        monkeypatch.setattr(ablations, f"create_{name}_artifact", lambda *_, **__: None)
    monkeypatch.setattr("flows.runtime.guard.ProgressArtifact", Silent)
    return devices


class Silent:
    """A progress artifact that nobody sees."""

    def __call__(self, *told):
        pass

    def end(self):
        pass


def ended_state(*arguments, return_state):
    """The state in which a branch's flow ends, without Prefect."""
    from prefect.states import Completed, Failed

    from flows.ablation.branch import run_branch

    assert return_state
    try:
        return Completed(data=run_branch.fn(*arguments))
    except Exception as error:
        return Failed(data=error)


def profile(directory, **changes):
    """A profile's file, with its root beside it."""
    path = directory / "tried.yaml"
    path.write_text(yaml.safe_dump(PROFILE | {"root": str(directory / "root")} | changes))
    return str(path)
