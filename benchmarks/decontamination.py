"""Precision, recall and speed of decontamination on a labelled set built from the benchmark's own
tasks.

    python -m benchmarks.decontamination --benchmark kernelbench.parquet --out decontamination.md
    [--tasks kernelbook.parquet]

Positives: every task of levels 1 to 3, changed mechanically (`benchmarks.planted`); the task it
came from, or one of its family, must be found, and at the level that is there for the change.
Negatives: every task, unchanged and changed, against the benchmark without its family; what is
found there is wrong. A family is decided by the tasks' names (`family`), not by anything that is
measured. `--tasks` are further training tasks to compare, whose matches a person must read.
"""

from __future__ import annotations

import argparse
import datetime
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.planted import PLANTED, kernelbook_form, kernelbook_sizes, near_misses
from kernels_eval.records import KernelTask
from tasks.decontamination.config import LEVELS, DecontaminationConfig
from tasks.decontamination.decontamination import compare
from tasks.decontamination.fingerprints import (
    Fingerprint,
    NearIndex,
    fingerprint_of,
    jaccard,
    shared,
    shingles_of,
)
from tasks.sources import kernelbench, kernelbook

RELATIVES = (
    "MLP",
    "VGG",
    "ResNet",
    "LSTM",
    "GRU",
    "VanillaRNN",
    "NetVlad",
    "Mamba",
    "EfficientNet",
    "DenseNet",
    "GoogleNet",
    "SqueezeNet",
    "MobileNet",
    "ShuffleNet",
    "SwinMLP|SwinTransformer",
    "MinGPTCausal|MiniGPTBlock|ReLUSelfAttention",
)
SWEPT_OPERATORS = (1, 2, 3, 4, 5)
SWEPT_NEAR = tuple(
    (length, threshold) for length in (3, 5, 8) for threshold in (0.5, 0.6, 0.7, 0.8)
)
SWEPT_SHARED = (0.0, 0.6, 0.7, 0.8)


def family(task: KernelTask) -> str:
    """The computation that a task's name tells, sizes and kinds of sizes aside."""
    name = re.sub(r"^\d+_", "", task.name).strip("_")
    if task.level == 1:
        if match := re.match(
            r"conv_(standard|transposed|depthwise|pointwise)_(separable_)?(\dD)", name
        ):
            kind = "transposed" if match[1] == "transposed" else "standard"
            return f"L1 conv {kind} {match[2] or ''}{match[3]}"
        if re.search(r"[Mm]at(mul|rix)", name) and not re.search(
            r"diagonal|triangular|transposed|scalar", name
        ):
            return "L1 matmul"
        if re.search(r"reduction|Argm", name):
            return f"L1 {name.split('_')[0]} reduction"
    for pattern in RELATIVES if task.level == 3 else ():
        if re.search(pattern, name):
            return f"L3 {pattern}"
    return f"L{task.level} {name}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--benchmark", required=True, help="KernelBench: a Parquet file, a folder or a hub id"
    )
    parser.add_argument("--tasks", help="KernelBook: a Parquet file or a hub id, compared too")
    parser.add_argument(
        "--copies", type=int, default=18_162, help="size of the set whose time is taken (0: none)"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tasks = [task for task in kernelbench.load(given.benchmark) if task.level in (1, 2, 3)]
    lines = report(tasks, given.tasks, given.copies)
    given.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def report(tasks: Sequence[KernelTask], further: str | None, copies: int) -> list[str]:
    config = DecontaminationConfig()
    families = {task.task_id: family(task) for task in tasks}
    known = [fingerprint_of(task.task_id, task.code) for task in tasks]
    planted = {name: list(_planted(tasks, name)) for name in PLANTED}
    results = {name: compare(fingerprints, known, config) for name, fingerprints in planted.items()}
    lines = [
        (
            f"{len(tasks)} tasks of levels 1 to 3 in {len(set(families.values()))} families."
            f" {datetime.datetime.now(datetime.UTC):%Y-%m-%d}."
        ),
        "",
        *_recall(planted, results, families),
        *_precision(planted, results, known, families, config),
        *_near_misses(config),
        *_sweeps(planted, known, families),
    ]
    if further:
        lines += _further(further, known, config)
    return lines + (_speed(tasks, known, copies, config) if copies else [])


def _planted(tasks: Sequence[KernelTask], name: str) -> Iterator[Fingerprint]:
    for task in tasks:
        changed = PLANTED[name][1](task.code)
        if changed is not None:
            yield fingerprint_of(task.task_id, changed)


def _recall(planted: dict, results: dict, families: dict[str, str]) -> list[str]:
    lines = ["## Recall: planted contamination", ""]
    lines += [
        f"| change | level for it | planted | found | at that level | {' | '.join(LEVELS)} | found"
        " as another family |"
    ]
    lines += ["| --- | --- | ---: | ---: | ---: |" + " ---: |" * (len(LEVELS) + 1)]
    totals: Counter[str] = Counter()
    for name, fingerprints in planted.items():
        result, wanted = results[name], PLANTED[name][0]
        other = sum(
            families[row["task_id"]] != families[row["benchmark_task_id"]]
            for row in result.removed.iter_rows(named=True)
        )
        counts = result.counts
        totals += Counter(
            planted=len(fingerprints),
            found=result.removed.height,
            right=counts[wanted],
            other=other,
        )
        shown = " | ".join(str(counts[level]) for level in LEVELS)
        lines.append(
            f"| {name} | {wanted} | {len(fingerprints)} |"
            f" {_share(result.removed.height, len(fingerprints))} |"
            f" {_share(counts[wanted], len(fingerprints))} | {shown} | {other} |"
        )
    same = sum(
        len(fingerprints) for name, fingerprints in planted.items() if not name.startswith("edited")
    )
    kept = sum(
        len(result.kept) for name, result in results.items() if not name.startswith("edited")
    )
    lines += [
        "",
        (
            f"All: {_share(totals['found'], totals['planted'])} of {totals['planted']} found,"
            f" {totals['other']} as another family."
        ),
    ]
    return [
        *lines,
        (
            f"Without the edited ones, which are another program: {_share(same - kept, same)} of"
            f" {same}."
        ),
        "",
    ]


def _precision(
    planted: dict,
    results: dict,
    known: list[Fingerprint],
    families: dict[str, str],
    config: DecontaminationConfig,
) -> list[str]:
    lines = ["## Precision: tasks against the benchmark without their family", ""]
    lines += [
        f"| tasks | compared | wrongly found | {' | '.join(LEVELS)} |",
        "| --- | ---: | ---: |" + " ---: |" * len(LEVELS),
    ]
    wrong: dict[str, Counter[str]] = {name: Counter() for name in planted}
    pairs: Counter[tuple[str, str, str]] = Counter()
    keys: dict[str, dict[str, list[str]]] = {level: {} for level in LEVELS if level != "near"}
    near = NearIndex(config)
    for task in known:
        near.add(task)
        for level, own in keys.items():
            for key in task.keys(config.min_operators).get(level, ()):
                own.setdefault(key, []).append(task.task_id)
    relatives = {
        name: frozenset(other for other in families if families[other] == families[name])
        for name in families
    }
    for change, fingerprints in planted.items():
        for task in fingerprints:
            own = relatives[task.task_id]
            equal = [
                (level, name)
                for level in keys
                for key in task.keys(config.min_operators).get(level, ())
                for name in keys[level].get(key, ())
                if name not in own
            ]
            if not equal and (found := near.find(task, own)):
                equal = [("near", found[0])]
            if equal:
                wrong[change][equal[0][0]] += 1
                pairs[families[task.task_id], families[equal[0][1]], equal[0][0]] += 1
    for change, counts in wrong.items():
        shown = " | ".join(str(counts[level]) for level in LEVELS)
        lines.append(f"| {change} | {len(planted[change])} | {counts.total()} | {shown} |")
    true = sum(result.removed.height for result in results.values())
    total, compared = (
        sum(counts.total() for counts in wrong.values()),
        sum(map(len, planted.values())),
    )
    lines += [
        "",
        (
            f"{total} of {compared} wrong: precision {true / (true + total):.4f} where half of the"
            " set is contaminated."
        ),
    ]
    shown = "; ".join(
        f"{a} = {b} ({level}, {count} times)" for (a, b, level), count in pairs.most_common(12)
    )
    return [*lines, f"Wrong pairs: {shown or 'none'}.", ""]


def _near_misses(config: DecontaminationConfig) -> list[str]:
    """The pairs of `near_misses.yaml` that are taken for one task, in three forms."""
    lines = ["## Precision: hand-written near misses", "", "| form | pairs | wrongly found |"]
    lines += ["| --- | ---: | --- |"]
    pairs = list(near_misses())
    forms = {"KernelBench's": str, "KernelBook's": kernelbook_form}
    for form, written in (forms | {"KernelBook's, its sizes": kernelbook_sizes}).items():
        wrong = []
        for name, code, near in pairs:
            known = [fingerprint_of("known", code)]
            found = compare([fingerprint_of(name, written(near) or "")], known, config).removed
            wrong += [f"{name} ({level})" for level in found["level"]]
        lines.append(f"| {form} | {len(pairs)} | {len(wrong)}: {'; '.join(wrong)} |")
    return [*lines, ""]


def _sweeps(planted: dict, known: list[Fingerprint], families: dict[str, str]) -> list[str]:
    """The two thresholds: what each value finds of what it is for, and of what it must not."""
    forms = [
        task
        for name in ("functional or module form", "other form, shapes and renamed")
        for task in planted[name]
    ]
    lines = ["## The level operators alone, by min_operators", ""]
    lines += [
        (
            f"| min_operators | other forms found (of {len(forms)}) | wrongly found tasks (of"
            f" {len(known)}) |"
        ),
        "| ---: | ---: | ---: |",
    ]
    for least in SWEPT_OPERATORS:
        by_key: dict[str, set[str]] = {}
        for task in known:
            [key] = task.keys(least).get("operators", (task.task_id,))
            by_key.setdefault(key, set()).add(task.task_id)
        asked = [(task.task_id, *task.keys(least).get("operators", ("",))) for task in forms]
        found = sum(name in by_key.get(key, ()) for name, key in asked)
        wrong = sum(
            len({families[name] for name in same}) > 1 for same in by_key.values() for _ in same
        )
        lines.append(f"| {least} | {found} | {wrong} |")
    return [*lines, "", *_near_sweep(planted, known, families)]


def _near_sweep(planted: dict, known: list[Fingerprint], families: dict[str, str]) -> list[str]:
    """Edited tasks and wrong pairs that each setting finds; those whose operators are compared too,
    and by the shingles alone."""
    least = DecontaminationConfig().min_shingles
    edited = {task.task_id: task for task in planted["edited"]}
    originals = {task.task_id: task for task in known}
    lines = [
        (
            "## The level near alone, by shingle, threshold and shared operators (exact Jaccard"
            " similarity)"
        ),
        "",
    ]
    lines += [
        f"| shingle | threshold | shared operators | edited found (of {len(edited)}) | of level 3 |"
        " wrong pairs |"
    ]
    lines += ["| ---: | ---: | ---: | ---: | ---: | ---: |"]
    for length in sorted({length for length, _ in SWEPT_NEAR}):
        shingles = {
            name: shingles_of(task.canonical.words, length) for name, task in originals.items()
        }
        large = [name for name, its in shingles.items() if len(its) >= least]
        similar = [
            (
                name,
                jaccard(shingles_of(edited[name].canonical.words, length), shingles[name]),
                _shared(edited[name], originals[name]),
            )
            for name in large
            if name in edited
        ]
        pairs = [
            (a, b) for i, a in enumerate(large) for b in large[:i] if families[a] != families[b]
        ]
        others = [
            (jaccard(shingles[a], shingles[b]), _shared(originals[a], originals[b]))
            for a, b in pairs
        ]
        for threshold in [threshold for its, threshold in SWEPT_NEAR if its == length]:
            for common in SWEPT_SHARED:
                found = [
                    name
                    for name, text, operators in similar
                    if text >= threshold and operators >= common
                ]
                wrong = sum(text >= threshold and operators >= common for text, operators in others)
                third = sum("/L3/" in name for name in found)
                lines.append(
                    f"| {length} | {threshold} | {common} | {len(found)} | {third} | {wrong} of"
                    f" {len(others)} |"
                )
    return [*lines, ""]


def _shared(left: Fingerprint, right: Fingerprint) -> float:
    return shared(left.operators or (), right.operators or ())


def _further(location: str, known: list[Fingerprint], config: DecontaminationConfig) -> list[str]:
    tasks = kernelbook.load(location)
    result = compare(
        [fingerprint_of(task.task_id, task.code, task.entry_point) for task in tasks], known, config
    )
    return ["## Further tasks", "", result.markdown()]


def _speed(
    tasks: Sequence[KernelTask],
    known: list[Fingerprint],
    copies: int,
    config: DecontaminationConfig,
) -> list[str]:
    """As many different programs as asked for: the tasks in turn, each copy with a definition that
    no other has."""
    sources = [
        tasks[i % len(tasks)].code + f"\nCOPY = {i}\n\n\nclass Copy{i}(Model):\n    pass\n"
        for i in range(copies)
    ]
    started = time.perf_counter()
    fingerprints = [fingerprint_of(f"copy/{i}", code) for i, code in enumerate(sources)]
    made = time.perf_counter()
    result = compare(fingerprints, known, config)
    compared = time.perf_counter()
    unmatched = [
        replace(
            task,
            canonical=replace(
                task.canonical, exact=str(i), normalised=str(i), shapes=str(i), resized=None
            ),
            operators=None,
        )
        for i, task in enumerate(fingerprints)
    ]
    slow_started = time.perf_counter()
    compare(unmatched, known, config)
    slow = time.perf_counter() - slow_started
    return [
        "## Speed, one core",
        "",
        (
            f"{copies} tasks against {len(known)}: fingerprints {made - started:.1f} s"
            f" ({1e3 * (made - started) / copies:.2f} ms each), comparison {compared - made:.1f} s"
            f" ({result.removed.height} found), {slow:.1f} s where every task goes down to MinHash."
            f" Peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB."
        ),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / max(1, whole):.1f} %)"


if __name__ == "__main__":
    main()
