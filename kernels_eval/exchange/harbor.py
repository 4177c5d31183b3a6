"""Tasks as Harbor, TRL, verifiers and NeMo Gym read them
(https://www.harborframework.com/docs/tasks): one folder each.

An agent writes `/app/candidate.py`; `test.sh` runs this module, which writes the verdict and
`/logs/verifier/reward.txt`. A fault of machine or task leaves no reward. Agents must not be root.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.exchange import rendered
from kernels_eval.records import KernelTask, Language
from kernels_eval.rewards import recipe_of, reward
from kernels_eval.verify_file import read_candidate, verify

IMAGES = {False: "concur", True: "concur:cuda"}
"""Images of deployments/compose, by whether the language needs a GPU."""
FILES = {
    "task.toml": "harbor/task.toml.j2",
    "instruction.md": "harbor/instruction.md.j2",
    "environment/Dockerfile": "harbor/Dockerfile.j2",
    "tests/test.sh": "harbor/test.sh.j2",
}
"""Files of a task's folder, and the template of each."""
REWARD, VERDICT = "reward.txt", "verdict.json"


class Request(NamedTuple):
    task: KernelTask
    instruction: str


def write_tasks(
    requests: Iterable[Request], out: Path, language: Language, recipe: str = "concur"
) -> list[Path]:
    """Write and return a folder for each request. Raises UsageError for equal names or an unknown
    recipe.
    """
    recipe_of(recipe)
    folders: list[Path] = []
    for request in requests:
        name = _plain_name(request.task.task_id)
        folder = out / name
        if folder in folders:
            raise UsageError(f"two tasks would be {folder}", "give tasks other ids")
        values = {
            "name": name,
            "task": request.task,
            "instruction": request.instruction,
            "language": language,
            "recipe": recipe,
            "image": IMAGES[language.needs_gpu],
        }
        for file, template in FILES.items():
            _write(folder / file, rendered(template, **values).rstrip() + "\n")
        _write(folder / "tests/task.json", request.task.model_dump_json(indent=2) + "\n")
        (folder / "tests/test.sh").chmod(0o755)
        folders.append(folder)
    return folders


def _plain_name(task_id: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", task_id.lower()).strip("-") or "task"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def judge(
    task: Path, candidate: Path, out: Path, language: Language | None = None, recipe: str = "concur"
) -> float | None:
    """Verify a candidate file (missing: empty) and write reward and verdict to `out`. None, and no
    reward, where the task fails. Raises EvalError.
    """
    if not candidate.exists():
        candidate.touch()
    given = KernelTask.model_validate_json(task.read_text(encoding="utf-8"))
    found = read_candidate(given, str(candidate), language, note)
    verdict = verify(given, found, str(candidate))
    _write(out / VERDICT, verdict.model_dump_json(indent=2) + "\n")
    earned = reward(verdict, recipe_of(recipe))
    if earned is not None:
        _write(out / REWARD, f"{earned}\n")
    return earned


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels_eval.exchange.harbor", description="Judge a Harbor task."
    )
    parser.add_argument("task", type=Path)
    parser.add_argument("candidate", type=Path)
    parser.add_argument("--language", type=Language)
    parser.add_argument("--recipe", default="concur")
    parser.add_argument("--out", type=Path, default=Path("/logs/verifier"))
    given = parser.parse_args(arguments)
    try:
        earned = judge(given.task, given.candidate, given.out, given.language, given.recipe)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("no reward: the task itself fails" if earned is None else f"reward {earned}")
    return 0 if earned is not None else 1


if __name__ == "__main__":
    sys.exit(main())
