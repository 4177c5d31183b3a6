"""How long is a viewer of as many candidates as the paper sampled in writing, and in opening?

    python -m benchmarks.viewer write DIR --responses CANDIDATES.parquet --tasks KERNELBENCH.parquet
    python -m benchmarks.viewer open DIR

`write` makes a table of 90,810 candidates (5 of each of 18,162 tasks) whose responses are recorded
ones, in turn, with made-up verdicts, and writes its site with `flows.view`: seconds, peak memory of
the process, files and MB. `open` opens the site from disk in Chromium (playwright and the system's
Chromium), five times each with a new profile: ms until the first contentful paint, until rows are
there, until a filter has been applied, and until a candidate's page shows its code.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from kernels_eval.records import REASONS, Status
from tasks.tables import CANDIDATES, VERDICTS

TASKS, SAMPLES, PART = 18_162, 5, 2_000
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
    parser.add_argument("--count", type=int, default=TASKS, help="tasks")
    asked = parser.parse_args()
    found = write(asked) if asked.what == "write" else opened(asked.directory / "view/index.html")
    print(json.dumps(found, indent=2))


def write(asked: argparse.Namespace) -> dict[str, Any]:
    from flows.view import write_view

    asked.directory.mkdir(parents=True, exist_ok=True)
    table, tasks = make(asked)
    began = time.monotonic()
    write_view(str(table), tasks=str(tasks), out=str(asked.directory / "view"))
    seconds = time.monotonic() - began
    data = list((asked.directory / "view/data").iterdir())
    return {
        "candidates": asked.count * SAMPLES,
        "text_mb": round(pl.scan_parquet(table).select(lengths()).collect().item() / 1e6),
        "seconds": round(seconds, 1),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "files": len(data),
        "site_mb": round(sum(path.stat().st_size for path in data) / 1e6, 1),
        "index_mb": round((asked.directory / "view/data/index.js").stat().st_size / 1e6, 2),
    }


def make(asked: argparse.Namespace) -> tuple[Path, Path]:
    """The table of verdicts and candidates in one, and that of the tasks."""
    table, tasks = asked.directory / "verdicts.parquet", asked.directory / "tasks.parquet"
    programs = pl.read_parquet(asked.tasks)["code"].to_list()
    names = [f"kernelbook/{number:05d}" for number in range(asked.count)]
    codes = [programs[number % len(programs)] for number in range(asked.count)]
    pl.DataFrame({"task_id": names, "code": codes}).write_parquet(tasks)
    recorded = pl.read_parquet(asked.responses).select("response", "extracted_code").rows()
    draw = random.Random(0)
    own = [field for field in CANDIDATES if field.name not in VERDICTS.names]
    schema, rows = pa.schema([*VERDICTS, *own]), list[dict[str, Any]]()
    with pq.ParquetWriter(table, schema, compression="zstd") as writer:
        for number in range(asked.count * SAMPLES):
            rows.append(row(number, names, recorded, draw))
            if len(rows) == PART or number + 1 == asked.count * SAMPLES:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows.clear()
    return table, tasks


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


def lengths() -> pl.Expr:
    return pl.sum_horizontal(pl.col("reasoning", "answer", "code").str.len_bytes().sum())


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
