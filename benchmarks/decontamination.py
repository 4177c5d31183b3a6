"""What decontamination finds of planted copies of the benchmark's tasks, and what it takes for
another task.

    python -m benchmarks.decontamination --benchmark kernelbench.parquet [--tasks 200]
        [--changes NAME ...] [--clean kernelbook.parquet] --out decontamination.md

Every program is traced in the sandbox, as in a run (`tasks.workload`). Planted copies are tasks of
levels 1 to 3 changed mechanically (`tests.support.planted_tasks.changes`): the task that a copy
came from, or one of its family by their names, must be found. A copy is also compared with the
benchmark without its family: what is found there is wrong. Beside them: hand-written near misses,
the forms of level 1 as modules and as functions at other sizes, and tasks that are known to be
clean.
"""

from __future__ import annotations

import argparse
import datetime
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kernels_eval.records import KernelTask
from tasks.decontamination.config import LEVELS
from tasks.decontamination.matching import Fingerprint, Index
from tasks.sources import kernelbench, kernelbook
from tasks.workload.measure import measured
from tests.support.planted_tasks.changes import PLANTED, near_misses
from tests.support.planted_tasks.forms import forms

CHANGES = (
    "renamed",
    "commutative",
    "functional or module form",
    "shapes",
    "in place",
    "dead code",
    "reshaped",
    "KernelBook's form and sizes",
    "edited",
)
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


class Traced(NamedTuple):
    """Fingerprints by task_id, and the mean seconds that each took in its process."""

    fingerprints: dict[str, Fingerprint]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--benchmark", required=True, help="KernelBench: a Parquet file, a folder or a hub id"
    )
    parser.add_argument("--tasks", type=int, default=200, help="tasks that copies are planted of")
    parser.add_argument("--changes", nargs="+", choices=PLANTED, default=CHANGES)
    parser.add_argument("--clean", help="KernelBook: a Parquet file or a hub id, compared too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with options.out.open("w") as page:
        for line in report(options):
            print(line, flush=True)
            print(line, file=page, flush=True)


def report(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the page, each as soon as it is known."""
    tasks = [task for task in kernelbench.load(options.benchmark) if task.level in (1, 2, 3)]
    known = traced(tasks, options.jobs)
    families = {task.task_id: family(task) for task in tasks}
    untraced = [name for name, each in known.fingerprints.items() if each.graph is None]
    yield (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}. {len(tasks)} tasks of levels 1 to 3 in"
        f" {len(set(families.values()))} families, {len(untraced)} not traced: {untraced}."
    )
    yield f"Seconds a task in its process: mean {known.seconds:.3f}."
    yield ""
    drawn = drawn_evenly(tasks, options.tasks)
    yield from planted_lines(drawn, known, families, options)
    yield from near_miss_lines(options.jobs)
    yield from form_lines(known, options.jobs)
    if options.clean:
        yield from clean_lines(options.clean, known, options.jobs)


def drawn_evenly(tasks: Sequence[KernelTask], count: int) -> list[KernelTask]:
    """So many of the tasks, from the first to the last."""
    count = min(count, len(tasks))
    return [tasks[number * len(tasks) // count] for number in range(count)]


def traced(tasks: Iterable[KernelTask], jobs: int) -> Traced:
    found, started = {}, time.monotonic()
    for task, workload in measured(tasks, jobs):
        graph = workload.graph
        row = graph.model_dump(mode="json") if graph else None
        found[task.task_id] = Fingerprint(task.task_id, task.code, row)
    seconds = jobs * (time.monotonic() - started) / max(1, len(found))
    return Traced(dict(sorted(found.items())), seconds)


def index_of(fingerprints: Iterable[Fingerprint]) -> Index:
    index = Index(LEVELS)
    for each in fingerprints:
        index.add(each)
    return index


def planted_lines(
    tasks: Sequence[KernelTask],
    known: Traced,
    families: dict[str, str],
    options: argparse.Namespace,
) -> Iterator[str]:
    everything = index_of(known.fingerprints.values())
    yield "## Planted copies"
    yield ""
    yield (
        f"| change | planted | found | {' | '.join(LEVELS)} | as another family | wrongly found"
        " without its family |"
    )
    yield "| --- | ---: | ---: |" + " ---: |" * (len(LEVELS) + 2)
    totals: Counter[str] = Counter()
    missed = []

    @cache
    def without(own: str) -> Index:
        """The benchmark without a family."""
        return index_of(each for name, each in known.fingerprints.items() if families[name] != own)

    for change in options.changes:
        copies = traced(planted(tasks, change), options.jobs).fingerprints
        matches = {name: everything.find(copy) for name, copy in copies.items()}
        levels = Counter(match.level for match in matches.values() if match)
        other = sum(
            families[match.task_id] != families[name] for name, match in matches.items() if match
        )
        wrong = [name for name, copy in copies.items() if without(families[name]).find(copy)]
        missed += [f"{name} {change}" for name, match in matches.items() if match is None]
        counts = " | ".join(str(levels[level]) for level in LEVELS)
        yield (
            f"| {change} | {len(copies)} | {share(levels.total(), len(copies))} | {counts} |"
            f" {other} | {len(wrong)} |"
        )
        if not change.startswith("edited"):
            totals += Counter(planted=len(copies), found=levels.total(), wrong=len(wrong))
    found = share(totals["found"], totals["planted"])
    yield ""
    yield (
        f"Without the edited ones, which are another program: {found} of {totals['planted']} found,"
        f" {totals['wrong']} taken for another family."
    )
    yield f"Missed: {', '.join(missed) or 'none'}."
    yield ""


def planted(tasks: Iterable[KernelTask], change: str) -> Iterator[KernelTask]:
    for task in tasks:
        code = PLANTED[change][1](task.code)
        if code is not None:
            form = "args_kwargs" if "KernelBook" in change else "args"
            yield task.model_copy(update={"code": code, "init_form": form})


def near_miss_lines(jobs: int) -> list[str]:
    pairs = list(near_misses())
    tasks = [
        KernelTask(task_id=f"{name}/{side}", name=name, code=code)
        for name, *codes in pairs
        for side, code in zip(("task", "near"), codes, strict=True)
    ]
    found = traced(tasks, jobs).fingerprints
    wrong = []
    for name, *_ in pairs:
        match = index_of([found[f"{name}/task"]]).find(found[f"{name}/near"])
        wrong += [f"{name} ({match.level})"] if match else []
    return [
        "## Near misses",
        "",
        f"{len(wrong)} of {len(pairs)} taken for one task: {'; '.join(wrong) or 'none'}.",
        "",
    ]


def form_lines(known: Traced, jobs: int) -> list[str]:
    """Forms of level 1 against the benchmark."""
    everything = index_of(known.fingerprints.values())
    all_forms = list(forms())
    tasks = [
        KernelTask(task_id=str(number), name=form.task, code=form.code)
        for number, form in enumerate(all_forms)
    ]
    found = traced(tasks, jobs).fingerprints
    right, missed, wrong = 0, [], []
    for number, form in enumerate(all_forms):
        match = everything.find(found[str(number)])
        own = {f"kernelbench/L1/{problem}" for problem in form.problems}
        if match is None:
            missed.append(form.text)
        elif match.task_id in own:
            right += 1
        else:
            wrong.append(f"{form.text} = {match.task_id}")
    return [
        "## Level 1 as modules and functions, at other sizes",
        "",
        f"{share(right, len(all_forms))} of {len(all_forms)} found. Missed:"
        f" {'; '.join(missed) or 'none'}. As another task: {'; '.join(wrong) or 'none'}.",
        "",
    ]


def clean_lines(location: str, known: Traced, jobs: int) -> list[str]:
    everything = index_of(known.fingerprints.values())
    tasks = traced(kernelbook.load(location), jobs)
    matches = {name: everything.find(each) for name, each in tasks.fingerprints.items()}
    untraced = sum(each.graph is None for each in tasks.fingerprints.values())
    started = time.process_time()
    for each in tasks.fingerprints.values():
        everything.find(each)
    comparing = (time.process_time() - started) / max(1, len(tasks.fingerprints))
    mean = tasks.seconds
    return [
        "## Further tasks, to be read by a person",
        "",
        f"{len(matches)} tasks, {untraced} not traced, {mean:.3f} s each to trace and"
        f" {1e3 * comparing:.2f} ms to compare: 18,162 take {18_162 * mean / 3600:.1f} hours on one"
        " core.",
        *(
            f"- {name} = {match.task_id} ({match.level})"
            for name, match in matches.items()
            if match
        ),
        "",
    ]


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


def share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / max(1, whole):.1f} %)"


if __name__ == "__main__":
    main()
