"""Cases and expected values of tests, kept as tables in tests/data."""

from pathlib import Path

import yaml


def cases(name):
    """What tests/data/NAME.yaml holds, by the name that the tests use."""
    path = Path(__file__).parents[1] / "data" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))
