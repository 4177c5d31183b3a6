"""Searches whose verdicts are planted: a kernel's speed is a function of the numbers in its source,
so that the best one is known, and no compiler is needed."""

import re

from kernels_eval.errors import GpuLostError
from kernels_eval.judge.messages import Finding, Prepared, VerdictDraft, verdict_of
from kernels_eval.records import Candidate, KernelTask, Language, Timing
from tasks.search.config import SearchConfig
from tasks.search.stage import Search
from tasks.tables import CANDIDATES, TASKS
from tasks.verification import confirmation
from tasks.verification import stage as verification
from tasks.verification.config import VerificationConfig
from tests.support.pools import PoolAlone
from tests.support.samples import finished

KERNEL = '''source = r"""
#include <torch/extension.h>
constexpr int TILE = {tile};
constexpr int UNROLL = {unroll};
// task {task}
"""
class ModelNew: pass
'''
ONCE = VerificationConfig(once_per_code=True, chunk_size=8)


def planted_speed(code):
    """2 at TILE 64 and UNROLL 8, less for each doubling away from them; None (wrong) above 128."""
    tile, unroll = (int(re.search(rf"{name} = (\d+)", code)[1]) for name in ("TILE", "UNROLL"))
    away = abs(tile.bit_length() - 7) + abs(unroll.bit_length() - 4)
    return None if tile > 128 else 2.0 / (1 + 0.25 * away)


class PlantedPool(PoolAlone):
    """A pool that needs no compiler. `lost_after`: the machine fails after so many verdicts."""

    def __init__(self, speed=planted_speed, lost_after=None):
        super().__init__()
        self.speed, self.lost_after, self.level = speed, lost_after, "confirm"

    def verify(self, pairs):
        for task, candidate in pairs:
            if self.lost_after is not None and len(self.asked) >= self.lost_after:
                raise GpuLostError("the device is gone")
            self.asked.append(candidate.candidate_id)
            yield verdict(task, candidate, self.speed(str(candidate.code)), self.level)


def verdict(task, candidate, speed, level="confirm"):
    timing = speed and Timing(
        reference_ms=speed,
        candidate_ms=1,
        speedup=speed,
        speedup_lower=0.99 * speed,
        speedup_upper=1.01 * speed,
        pairs=10,
        calls_per_sample=1,
        clock_bound_ms=0.5,
    )
    finding = Finding(reason="ok" if speed else "wrong_output")
    draft = VerdictDraft(level=level, timing=timing or None, run_s=1.0, device="cpu")
    prepared = Prepared(candidate_id=candidate.candidate_id)
    return verdict_of(task, candidate, prepared, finding, draft)


def judge_of(pool, kind=verification.Verification):
    """Verification, or another `kind` of it, whose pool this is."""

    class Judged(kind):
        def pool(self):
            pool.level = self.config.protocol.level
            return pool

    return Judged


class Planted:
    """A root with tasks and verified candidates, among which is searched."""

    def __init__(self, root, tasks=2, stage="tasks", **changes):
        self.root = str(root)
        known = [
            KernelTask(task_id=f"t/{n}", name=f"t{n}", code=f"class Model: n = {n}")
            for n in range(tasks)
        ]
        given = [task.model_dump(mode="json") for task in known]
        self.tasks = finished(root, stage, given, TASKS, stage.replace("tasks", "t"))
        rows = [
            Candidate(
                candidate_id=f"c/{task.task_id}/{number}",
                task_id=task.task_id,
                language=Language.CPP,
                generator="writer",
                sample_index=number,
                response="...",
                reasoning=f"I think, {number} times.",
                reasoning_tokens=4,
                code=KERNEL.format(tile=(16, 256)[number], unroll=1, task=task.name),
            ).model_dump(mode="json")
            for task in known
            for number in range(2)
        ]
        asked = [row | {"request_key": row["candidate_id"]} for row in rows]
        name = stage.replace("tasks", "c")
        self.candidates = finished(root, "synthesis", asked, CANDIDATES, name)
        self.verdicts = self.verified(self.candidates, PlantedPool(), VerificationConfig())
        self.config = SearchConfig.model_validate({"evaluations": 12, "batch": 3} | changes)

    def verified(self, candidates, pool, config):
        asked = (candidates, self.tasks, config, Language.CPP)
        return verification.run(*asked, verification=judge_of(pool))

    def confirmed(self, verdicts, candidates, pool, rule):
        asked = (verdicts, candidates, self.tasks, ONCE, Language.CPP, rule)
        return confirmation.run(*asked, confirmation=judge_of(pool, confirmation.Confirmation))

    def search(self, config=None):
        above = (self.verdicts, self.candidates, self.tasks)
        return Search(*above, config or self.config, Language.CPP, conditions="planted")

    def judge(self, search, pool):
        return judge_of(pool)(search.snapshot.ref, self.tasks, ONCE, Language.CPP)
