"""How long is a viewer of as many candidates as the paper sampled in writing, and in opening?

    python -m benchmarks.viewer write DIR --responses CANDIDATES.parquet --tasks KERNELBENCH.parquet
    python -m benchmarks.viewer open DIR

`write` makes a root with 90,810 candidates (5 of each of 18,162 tasks) whose responses are recorded
ones, in turn, with made-up verdicts. It writes the site of nine in ten of them with `flows.view`,
and then, as another night does, of all: seconds, those of the process's CPU, peak memory, files and
MB. `open` opens the site from disk in Chromium (playwright and the system's Chromium), five times
each with a new profile: ms until the first contentful paint, until rows are there, until a filter
has been applied, and until a candidate's page shows its code.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from kernels_eval.records import REASONS, Status, stable_hash
from tasks.store import Snapshot
from tasks.tables import CANDIDATES, TASKS, VERDICTS

COUNT, SAMPLES = 18_162, 5
STATUSES = {
    Status.CORRECT: 0.35,
    Status.INCORRECT: 0.25,
    Status.COMPILE_ERROR: 0.2,
    Status.RUNTIME_ERROR: 0.1,
    Status.REJECTED: 0.05,
    Status.NO_CODE: 0.05,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["write", "open"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--responses", type=Path)
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--count", type=int, default=COUNT, help="tasks")
    asked = parser.parse_args()
    found = write(asked) if asked.what == "write" else opened(asked.directory / "view/index.html")
    print(json.dumps(found, indent=2))


def write(asked: argparse.Namespace) -> dict[str, Any]:
    from flows.view import write_view

    root, nights = asked.directory, {}
    for night, left_out in {"without every tenth": 10, "all": 0}.items():
        text_mb = make(root, asked, left_out)
        began, began_cpu = time.monotonic(), time.process_time()
        write_view(str(root))
        nights[night] = {
            "seconds": round(time.monotonic() - began, 1),
            "cpu_seconds": round(time.process_time() - began_cpu, 1),
        }
    data = list((root / "view/data").iterdir())
    return {
        "candidates": asked.count * SAMPLES,
        "text_mb": text_mb,
        "written": nights,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "files": len(data),
        "site_mb": round(sum(path.stat().st_size for path in data) / 1e6, 1),
        "index_mb": round((root / "view/data/index.js").stat().st_size / 1e6, 2),
    }


def make(root: Path, asked: argparse.Namespace, left_out: int) -> int:
    """Finished snapshots of tasks, candidates and verdicts; every `left_out`-th candidate is not in
    them. Returns the size of their texts in MB."""
    programs = pl.read_parquet(asked.tasks)["code"].to_list()
    names = [f"kernelbook/{number:05d}" for number in range(asked.count)]
    recorded = pl.read_parquet(asked.responses).select("response", "extracted_code").rows()
    known = {"entry_point": "Model", "init_form": "args", "source": "kernelbook"}
    tasks = [
        {"task_id": name, "name": name, "code": programs[number % len(programs)], **known}
        for number, name in enumerate(names)
    ]
    sizes: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        draw = random.Random(0)
        for number in range(asked.count * SAMPLES):
            made = row(number, names, recorded, draw)
            if not left_out or number % left_out:
                sizes.append(sum(len(made[text] or "") for text in ("reasoning", "answer", "code")))
                yield made

    upstream: list[str] = []
    stages = {"tasks": (tasks, TASKS), "synthesis": (rows(), CANDIDATES)}
    for stage, (found, schema) in (stages | {"verification": (rows(), VERDICTS)}).items():
        snapshot = Snapshot(str(root), stage, stable_hash([stage, asked.count, left_out]))
        if not snapshot.finished:
            snapshot.append(found, schema)
            snapshot.publish(config={}, upstream=upstream)
        upstream.append(snapshot.fingerprint)
    return round(sum(sizes) / 2e6)


def row(
    number: int, names: list[str], recorded: list[tuple[str, str]], draw: random.Random
) -> dict[str, Any]:
    """A candidate with its verdict."""
    response, code = recorded[number % len(recorded)]
    reasoning, _, answer = response.rpartition("</think>")
    (status,) = draw.choices(list(STATUSES), list(STATUSES.values()))
    speedup = draw.lognormvariate(0.0, 0.7)
    latencies = {"reference_ms": 1.0, "candidate_ms": 1.0 / speedup, "clock_bound_ms": 1.0}
    bounds = {"speedup_lower": 0.95 * speedup, "speedup_upper": 1.05 * speedup}
    counts = {"pairs": 50, "calls_per_sample": 10, "drift": 0.0}
    return {
        "candidate_id": f"{draw.getrandbits(128):032x}",
        "task_id": names[number // SAMPLES],
        "language": "cuda",
        "status": status.value,
        "reason": draw.choice(sorted(REASONS[status])).value,
        "detail": "of a benchmark",
        "timing": {**latencies, **bounds, **counts, "speedup": speedup}
        if status is Status.CORRECT
        else None,
        "flags": draw.choice([[], [], ["clock_drift"], ["side_stream", "clock_drift"]]),
        "outputs_match": status is Status.CORRECT,
        "device": "a GPU",
        "log_tail": "error: of a benchmark\n" * 20 if status is Status.COMPILE_ERROR else "",
        "generator": draw.choice(["Kevin-32B", "QwQ-32B"]),
        "sample_index": number % SAMPLES,
        "reasoning": reasoning,
        "answer": answer,
        "code": code,
        "reasoning_tokens": len(reasoning) // 4,
    }


def opened(page: Path) -> dict[str, float]:
    """Medians of five openings, in ms since the navigation began."""
    from playwright.sync_api import sync_playwright

    from tests.support.browser import FLAGS, chromium_path

    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    found: dict[str, list[float]] = {}
    with sync_playwright() as playwright:
        for _ in range(5):
            browser = playwright.chromium.launch(executable_path=chromium_path(), args=list(FLAGS))
            window = browser.new_page(viewport={"width": 1280, "height": 900})
            window.goto(page.absolute().as_uri())
            window.wait_for_selector("#table .tabulator-row")
            found.setdefault("first_rows_ms", []).append(window.evaluate("performance.now()"))
            found.setdefault("first_paint_ms", []).append(window.evaluate(paint))
            found.setdefault("heap_mb", []).append(
                window.evaluate("performance.memory.usedJSHeapSize / 1e6")
            )
            began = window.evaluate("performance.now()")
            window.select_option("[name=status]", "correct")
            window.wait_for_function("!$('count').textContent.startsWith(form(about.rows.length))")
            found.setdefault("filter_ms", []).append(window.evaluate("performance.now()") - began)
            began = window.evaluate("performance.now()")
            window.click("#table .tabulator-row a")
            window.wait_for_selector("#candidate pre")
            found.setdefault("candidate_ms", []).append(
                window.evaluate("performance.now()") - began
            )
            browser.close()
    return {name: round(statistics.median(values)) for name, values in found.items()}


if __name__ == "__main__":
    main()
