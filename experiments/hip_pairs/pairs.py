"""Correct CUDA kernels beside their HIP form, as a data set of pairs like CASS (arXiv 2505.16968).

    python -m experiments.hip_pairs.pairs verified --out pairs

Guarantees: `compiled` says that hipcc made assembly, and is no verdict: nothing runs. Each pair is
on disk before it is counted, so that a run that was stopped resumes. `datasets.load_dataset` reads
the folder. Does not guarantee machine code: `cuda_device` is null where nvcc or cuobjdump is
missing. Of CASS's columns there are those of the device; its host assembly is not made.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa

from experiments.hip_pairs import hip
from flows.exchange import Judged, judged
from kernels_eval.config import EvalConfig
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.prepare import Preparer
from kernels_eval.records import Candidate, Json, KernelTask, Row, stable_hash
from kernels_eval.source.spec import ExtensionSpec
from kernels_eval.source.syntax import UNPARSABLE, parse_source
from tasks.files import atomic_write
from tasks.progress import report
from tasks.store import Snapshot, fingerprint

STAGE = "hip-pairs"
VERSION = 1
"""Raised when the same kernels may give other pairs."""
PAIRS = pa.schema(
    [
        ("candidate_id", pa.string()),
        ("task_id", pa.string()),
        ("generator", pa.string()),
        ("cuda_source", pa.string()),
        ("cuda_device", pa.string()),
        ("cuda_arch", pa.string()),
        ("hip_source", pa.string()),
        ("hip_device", pa.string()),
        ("hip_arch", pa.string()),
        ("compiled", pa.bool_()),
        ("cause", pa.string()),
        ("detail", pa.string()),
        ("kernels", pa.list_(pa.string())),
    ]
)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verdicts", help="a snapshot, folder or table of verdicts")
    parser.add_argument("--out", required=True, help="folder of the pairs; one begun is resumed")
    parser.add_argument("--tasks", help="tasks of the verdicts, where none are beside them")
    parser.add_argument("--candidates", help="their candidates, where none are beside them")
    asked = parser.parse_args(arguments)
    try:
        found = judged(asked.verdicts, asked.candidates, asked.tasks, ".concur")
        kernels, left_out = correct_kernels(found)
        summary = write_pairs(kernels, Path(asked.out))
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**summary, "left_out": left_out}))
    return 0


def correct_kernels(found: Iterable[Judged]) -> tuple[list[Kernel], Counter[str]]:
    """The correct CUDA kernels, and why others were left out. Raises UsageError without any."""
    kernels: list[Kernel] = []
    left_out = Counter[str]()
    for each in found:
        if not each.candidate.language.needs_nvcc:
            left_out[f"the language is {each.candidate.language}"] += 1
        elif not each.verdict.correct_custom:
            left_out[f"the verdict is {each.verdict.status.value}"] += 1
        else:
            kernels.append((each.task, each.candidate))
    if not kernels:
        raise UsageError("no verdict is of a correct CUDA kernel", "choose other verdicts")
    return kernels, left_out


def write_pairs(kernels: Sequence[Kernel], target: Path) -> Json:
    """Write a snapshot of PAIRS and a card below `target`, or resume it. Returns the counts of the
    card. Raises ToolchainError where there is no hipcc."""
    config = {"hip_arch": hip.default_arch(), "cuda_arch": hip.CUDA_ARCH}
    upstream = [stable_hash([[each.candidate_id, each.code] for _, each in kernels])]
    key = fingerprint(STAGE, config, upstream, VERSION)
    snapshot = Snapshot(str(target), STAGE, key)
    if not snapshot.finished:
        fill(snapshot, kernels)
        snapshot.publish(config=config, upstream=upstream)
    rows = snapshot.read(columns=["compiled", "cause", "cuda_device"])
    causes = dict(sorted(rows["cause"].drop_nulls().value_counts().iter_rows()))
    counts = {"pairs": len(rows), "compiled": int(rows["compiled"].sum())}
    table = "\n".join(f"| {cause} | {count} |" for cause, count in causes.items())
    files = f"{STAGE}/{key}/part-*.parquet"
    atomic_write(target / "README.md", CARD.format(files=files, causes=table, **counts, **config))
    return {**config, **counts, "with_machine_code": rows["cuda_device"].count(), "causes": causes}


def fill(snapshot: Snapshot, kernels: Sequence[Kernel]) -> None:
    snapshot.recover(PAIRS)
    done = snapshot.keys("candidate_id")
    left = [each for each in kernels if each[1].candidate_id not in done]
    number = len(kernels) - len(left)
    waiting = iter(left)
    workers = os.cpu_count() or 1
    with (
        closing(Preparer(EvalConfig())) as preparer,
        ThreadPoolExecutor(workers) as pool,
        snapshot.journal(PAIRS) as add,
    ):
        while batch := [(each, source_of(preparer, each)) for each in islice(waiting, workers)]:
            for row in pool.map(pair, batch):
                add(row)
                number += 1
                report(STAGE, number, len(kernels), f"{row['cause'] or 'ok'} {row['task_id']}")


def source_of(preparer: Preparer, kernel: Kernel) -> str:
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


def pair(asked: tuple[Kernel, str]) -> Row:
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


if __name__ == "__main__":
    sys.exit(main())
