"""The folder is entered by two functions and knows nothing of the rest of training."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tasks" / "training" / "acceleration"
IMPORTED = re.compile(r"^\s*from tasks\.training\.?([\w.]*) import (.+?)$", re.MULTILINE)


def imports(path):
    return IMPORTED.findall(path.read_text(encoding="utf-8"))


def test_acceleration_imports_nothing_of_the_rest_of_training():
    for path in FOLDER.glob("*.py"):
        assert all(module.startswith("acceleration") for module, _ in imports(path)), path.name


def test_training_enters_acceleration_by_its_functions_alone():
    entered = {
        (module.removeprefix("acceleration."), names)
        for folder in ("tasks", "flows")
        for path in (ROOT / folder).rglob("*.py")
        if FOLDER not in path.parents
        for module, names in imports(path)
        if module.startswith("acceleration")
    }
    assert entered == {
        ("training", "Accelerated, accelerate_training"),
        ("parallelism", "parallelism_for"),
    }
