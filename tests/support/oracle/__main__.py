"""Compare what two versions of the code make of the same data.

    python -m tests.support.oracle record --out GOLDEN.json [--section NAME ...]
    python -m tests.support.oracle compare GOLDEN.json [--section NAME ...]

Record with the code before a change, compare with the code after it: one line a difference, exit
status 1 where there is one. `--data DIR` (or CONCUR_ORACLE_DATA) holds recorded tables:
kernelbench.parquet, kernelbook_sample.parquet, qwq32b_candidates.parquet, tritonbench_t.parquet and
tritonbench_t_candidates.parquet. `--root DIR` is a workspace that `concur run --profile local` has
finished. Sections that need what is not given are skipped with a line.

A section is one module of this folder. Its adapters, the functions at the top, are the only lines
that call the product: who changes an interface edits them and leaves the golden file alone. Numbers
are rounded to 12 significant digits and compared with a relative tolerance of 1e-9; long texts are
compared by hash. A golden file holds derived data: keep it out of the repository.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.oracle.inputs import Inputs, NotGiven, plain

SECTIONS = (
    "curation",
    "scores",
    "observations",
    "decontamination",
    "prompts",
    "parsing",
    "training",
    "candidates",
    "verdicts",
)
MOST_LINES = 200
RELATIVE_TOLERANCE = 1e-9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("golden", type=Path, nargs="?", help="compare: the golden file")
    parser.add_argument("--out", type=Path, help="record: where the golden file goes")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--data", type=Path, default=os.environ.get("CONCUR_ORACLE_DATA"))
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    inputs = Inputs(data=options.data, root=options.root)
    if options.verb == "record":
        if options.out is None:
            parser.error("record needs --out")
        return record(options.out, options.section, inputs)
    if options.golden is None:
        parser.error("compare needs a golden file")
    return compare(options.golden, options.section, inputs)


def record(out: Path, sections: tuple[str, ...], inputs: Inputs) -> int:
    """Write the sections' results; those of other sections in the file stay."""
    golden = json.loads(out.read_text()) if out.is_file() else {}
    golden |= results(sections, inputs)
    out.write_text(json.dumps(golden, indent=0, sort_keys=True))
    return 0


def compare(file: Path, sections: tuple[str, ...], inputs: Inputs) -> int:
    golden = json.loads(file.read_text())
    known = tuple(name for name in sections if name in golden)
    for name in sections:
        if name not in known:
            print(f"{name}: skipped, {file} has no such section")
    found = results(known, inputs)
    lines = [
        f"{name}{line}" for name, now in found.items() for line in differences(golden[name], now)
    ]
    print("\n".join(lines[:MOST_LINES]))
    if len(lines) > MOST_LINES:
        print(f"... and {len(lines) - MOST_LINES} more")
    print(f"{len(lines)} differences in {', '.join(found)}")
    return 1 if lines else 0


def results(sections: tuple[str, ...], inputs: Inputs) -> dict[str, Any]:
    """Results by section; a section without its data is left out."""
    found = {}
    for name in sections:
        started = time.monotonic()
        try:
            made = import_module(f"tests.support.oracle.{name}").section(inputs)
        except NotGiven as missing:
            print(f"{name}: skipped, {missing}")
            continue
        found[name] = plain(made)
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    return found


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """One line a difference between two JSON values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            where = f"{path}.{key}"
            if key not in now:
                yield f"{where}: is gone, was {_shown(before[key])}"
            elif key not in before:
                yield f"{where}: is new, {_shown(now[key])}"
            else:
                yield from differences(before[key], now[key], where)
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            yield f"{path}: {len(before)} entries are now {len(now)}"
        for place, pair in enumerate(zip(before, now, strict=False)):
            yield from differences(*pair, f"{path}[{place}]")
    elif not same(before, now):
        yield f"{path}: {_shown(before)} is now {_shown(now)}"


def same(before: Any, now: Any) -> bool:
    numbers = (int, float)
    if isinstance(before, numbers) and isinstance(now, numbers):
        return math.isclose(before, now, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)
    return bool(before == now)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


if __name__ == "__main__":
    sys.exit(main())
