"""What the line confirms: samples that training sets take, and answers that scores count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flows.config import PipelineConfig
from tasks.curation.config import CurationConfig
from tasks.curation.kept import kept
from tasks.curation.stage import compared_by
from tasks.curation.tables import READ
from tasks.decontamination.deduplication import equal_kernels
from tasks.policy import call_stage
from tasks.samples import Samples
from tasks.store.snapshot import SnapshotRef
from tasks.verification.confirmation import EVERYTHING_RIGHT, Rule
from tasks.verification.step import confirm, verify
from tasks.versions import CURATION_VERSION


def confirmed_samples(
    config: PipelineConfig, samples: Samples, sets: Sequence[CurationConfig]
) -> Samples:
    """The samples with all verdicts confirmed that any of the training sets takes."""
    equal = equal_kernels(config.deduplication)
    rules = sorted((each.model_dump(mode="json") for each in sets), key=str)
    rule = Rule(
        identity=["training sets", rules, compared_by(equal), CURATION_VERSION],
        propose=partial(kept, samples, sets, equal),
        columns=READ,
        reads=(samples.workloads, samples.flags, samples.profiles),
    )
    of = (samples.verdicts, samples.candidates, samples.tasks)
    verdicts = call_stage(confirm, *of, config.verification, config.language, rule)
    return samples.model_copy(update={"verdicts": verdicts})


def judged_answers(
    config: PipelineConfig, candidates: SnapshotRef, suite: SnapshotRef
) -> SnapshotRef:
    """Verdicts of answers to held-out tasks, every right one confirmed, whoever computed it."""
    how = (config.verification, config.language)
    verdicts = call_stage(verify, candidates, suite, *how, confirms_all=True)
    return call_stage(confirm, verdicts, candidates, suite, *how, EVERYTHING_RIGHT)
