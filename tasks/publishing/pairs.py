"""Correct CUDA kernels beside their HIP form, as a data set of pairs like CASS (arXiv 2505.16968).

Guarantees: `compiled` says that hipcc made assembly, and is no verdict: nothing runs. Each pair is
on disk before it is counted, so that a run that was stopped resumes. `datasets.load_dataset` reads
the folder. Does not guarantee machine code: `cuda_device` is null where nvcc or cuobjdump is
missing. Of CASS's columns there are those of the device; its host assembly is not made.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

from kernels_eval.compile import hip
from kernels_eval.config import EvalConfig
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.prepare import Preparer
from kernels_eval.records import Candidate, Json, KernelTask, Row, stable_hash
from kernels_eval.source.spec import ExtensionSpec
from kernels_eval.source.syntax import UNPARSABLE, parse_source
from tasks.files import atomic_write
from tasks.progress import report
from tasks.store import Snapshot, fingerprint
from tasks.tables import HIP_PAIRS
from tasks.versions import PUBLISHING_VERSION

STAGE = "hip-pairs"
CARD = """\
---
configs:
- config_name: default
  data_files: {files}
---
# CUDA kernels and their HIP form

{pairs} CUDA kernels that verification found correct, by their device code. {compiled} of them
compile as HIP for {hip_arch}, which says nothing of their results: none of these has run.
Compilers: CUDA for {cuda_arch}, HIP for {hip_arch}.

| did not compile because of | kernels |
| --- | --- |
{causes}
"""
Kernel = tuple[KernelTask, Candidate]


def write_pairs(kernels: Sequence[Kernel], target: Path) -> Json:
    """Write a snapshot of tasks.tables.HIP_PAIRS and a card below `target`, or resume it. Returns
    the counts of the card. Raises ToolchainError where there is no hipcc."""
    asked = {
        "hip_arch": hip.default_arch(),
        "cuda_arch": hip.CUDA_ARCH,
        "hipify": bool(shutil.which("hipify-perl")),
    }
    upstream = [stable_hash([[each.candidate_id, each.code] for _, each in kernels])]
    key = fingerprint(STAGE, asked, upstream, PUBLISHING_VERSION)
    snapshot = Snapshot(str(target), STAGE, key)
    if not snapshot.finished:
        _fill(snapshot, kernels)
        snapshot.publish(config=asked, upstream=upstream)
    rows = snapshot.read(columns=["compiled", "cause", "cuda_device"])
    causes = dict(sorted(rows["cause"].drop_nulls().value_counts().iter_rows()))
    counts = {"pairs": len(rows), "compiled": int(rows["compiled"].sum())}
    table = "\n".join(f"| {cause} | {count} |" for cause, count in causes.items())
    files = f"{STAGE}/{key}/part-*.parquet"
    card = CARD.format(files=files, causes=table, **counts, **asked)
    atomic_write(target / "README.md", card)
    machine_code = rows["cuda_device"].count()
    return {**asked, **counts, "with_machine_code": machine_code, "causes": causes}


def _fill(snapshot: Snapshot, kernels: Sequence[Kernel]) -> None:
    snapshot.recover(HIP_PAIRS)
    done = snapshot.keys("candidate_id")
    left = [each for each in kernels if each[1].candidate_id not in done]
    number, waiting, workers = len(kernels) - len(left), iter(left), os.cpu_count() or 1
    with (
        closing(Preparer(EvalConfig())) as preparer,
        ThreadPoolExecutor(workers) as pool,
        snapshot.journal(HIP_PAIRS) as add,
    ):
        while batch := [(each, _source(preparer, each)) for each in islice(waiting, workers)]:
            for row in pool.map(_pair, batch):
                add(row)
                number += 1
                report(STAGE, number, len(kernels), f"{row['cause'] or 'ok'} {row['task_id']}")


def _source(preparer: Preparer, kernel: Kernel) -> str:
    """The CUDA source that a candidate asks to be built; where it asks for none without a GPU, the
    strings of its module that hold a kernel."""
    task, candidate = kernel
    specs: list[ExtensionSpec] = []
    with suppress(Stop):
        specs = preparer.requested(candidate, task)
    texts = [text for spec in specs for text in spec.cuda_sources]
    texts += [text for spec in specs for name, text in spec.files if not name.endswith(".cpp")]
    if not texts:
        with suppress(*UNPARSABLE):
            strings = ast.walk(parse_source(candidate.code or ""))
            constants = (node.value for node in strings if isinstance(node, ast.Constant))
            texts = [each for each in constants if isinstance(each, str) and "__global__" in each]
    return "\n".join(texts)


def _pair(asked: tuple[Kernel, str]) -> Row:
    (task, candidate), cuda = asked
    build = hip.compile_hip(cuda, arch=hip.default_arch())
    return {
        "candidate_id": candidate.candidate_id,
        "task_id": task.task_id,
        "generator": candidate.generator,
        "cuda_source": hip.device_code(cuda),
        "cuda_device": hip.sass_of(cuda) or None,
        "cuda_arch": hip.CUDA_ARCH,
        "hip_source": build.source,
        "hip_device": build.assembly or None,
        "hip_arch": build.arch,
        "compiled": build.compiled,
        "cause": build.cause or None,
        "detail": build.reason,
        "kernels": build.kernels,
    }
