"""Workers that do nothing, and candidates for them: the pool itself is what is tested."""

import os
import threading
from contextlib import contextmanager
from pathlib import Path

from kernels_eval.judge.messages import Prepared
from kernels_eval.pool.telemetry import Telemetry
from kernels_eval.records import Language, Verdict
from tests.support import kernels
from tests.support.kernels import AFFINE


class PoolAlone:
    """A pool without workers; its `verify` is the test's own."""

    def __init__(self, builders=1, devices=1):
        self.asked, self.quarantined, self.cautions = [], [], []
        self.telemetry = Telemetry(builders, devices)

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


@contextmanager
def fresh_ray(cpus, gpus):
    """A Ray of its own that believes in so many cores and GPUs; one that an earlier test left is
    stopped."""
    import ray

    ray.shutdown()
    start_ray_here(num_cpus=cpus, num_gpus=gpus, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


def start_ray_here(**options):
    """`ray.init` of a cluster of its own. Ray gives its processes 30 s, which a busy machine does
    not have: then it is started again."""
    import ray

    options = {"include_dashboard": False, "log_to_driver": False} | options
    for _ in range(20):
        try:
            return ray.init("local", **options)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    raise TimeoutError("Ray did not start in 20 attempts")


def many(count, name="many"):
    """Candidates that differ in their identity only."""
    base = kernels.candidate(AFFINE, "class ModelNew: pass")
    return [(AFFINE, base.model_copy(update={"candidate_id": f"{name}-{n}"})) for n in range(count)]


def outcomes(asked, verdicts):
    """The reasons in the order of asking; fails unless every candidate has exactly one verdict."""
    assert sorted(v.candidate_id for v in verdicts) == sorted(c.candidate_id for _, c in asked)
    found = {v.candidate_id: v for v in verdicts}
    assert all(found[c.candidate_id].task_id == task.task_id for task, c in asked)
    return [found[c.candidate_id].reason for _, c in asked]


class Quick:
    """Stands in for both kinds of worker: every candidate is correct at once."""

    def __init__(self, *_): ...

    def build(self, task, candidate, *_):
        return Prepared(candidate_id=candidate.candidate_id)

    def run(self, task, candidate, *_):
        of = {"candidate_id": candidate.candidate_id, "task_id": task.task_id}
        return Verdict(**of, language=Language.CPP, status="correct", reason="ok")


class Held(Quick):
    """Never ends its first run of a candidate that says HOLD, of which the file `HELD` tells."""

    def run(self, task, candidate, *_):
        begun = Path(os.environ["HELD"])
        if "HOLD" in candidate.code and not begun.exists():
            begun.touch()
            threading.Event().wait()
        return super().run(task, candidate)
