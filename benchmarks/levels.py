"""What each level of the protocol ends: the corpus of attacks and honest kernels, screened and
confirmed.

    python -m benchmarks.levels --out levels.jsonl

Judges every C++ candidate of tests/data/adversarial at level `screen` (`confirm` is what the tests
expect, and run). Prints, for cheats and honest
kernels, how many verdicts are those of `confirm`, and names the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from tests.support.adversarial import CORPUS, trials_of
from tests.support.kernels import verifying


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each candidate")
    parser.add_argument("--only", default="", help="candidates whose name holds this")
    asked = parser.parse_args()
    trials = [each for each in trials_of(CORPUS) if asked.only in each.name]
    with ExitStack() as stack, asked.out.open("w", encoding="utf-8") as file:
        verifier = cache(lambda config: stack.enter_context(verifying(config)))
        for number, trial in enumerate(trials, 1):
            judge = verifier(trial.config.screened())
            verdict = judge(trial.task, trial.code, language=trial.language)
            found = {"name": trial.name, "honest": trial.honest, "confirm": trial.expect}
            found |= {"screen": verdict.reason.value, "detail": verdict.detail}
            file.write(json.dumps(found) + "\n")
            file.flush()
            print(f"{number}/{len(trials)} {trial.name}: {verdict.reason}", file=sys.stderr)
    print(table([json.loads(line) for line in asked.out.read_text().splitlines()]))
    return 0


def table(rows: list[dict[str, object]]) -> str:
    lines = []
    for honest, kind in ((False, "cheats and faults"), (True, "honest kernels")):
        own = [row for row in rows if row["honest"] is honest]
        other = [row for row in own if row["screen"] not in row["confirm"]]
        lines.append(f"{kind}: {len(own) - len(other)} of {len(own)} as confirmed")
        for row in other:
            lines.append(f"  {row['name']}: screen {row['screen']}, confirm {row['confirm']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
