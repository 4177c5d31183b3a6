"""YAML and JSON that others wrote. What is wrong with it is a ValueError of one line."""

from __future__ import annotations

import json
import re
from typing import Any

MOST_VALUES = 100_000
"""Of a YAML document with its references followed: a few lines can stand for any number."""
_NO_VALUE = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
"""What PyYAML raises for dates, numbers and tags that are none."""
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
TOO_DEEP = "it is nested too deeply"


def yaml_of(text: str) -> Any:
    """The values of a YAML document. Raises ValueError, with the line where it is known."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except (yaml.YAMLError, *_NO_VALUE) as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"line {mark.line + 1}" if mark else "it cannot be read") from error
    if _size(found, {}) > MOST_VALUES:
        raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
    return found


def json_of(text: str | bytes) -> Any:
    """The values of a JSON document, halves of surrogate pairs as U+FFFD. Raises ValueError."""
    try:
        found = json.loads(text)
        if _SURROGATE.search(str(text)):
            whole = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
            found = json.loads(whole.decode("utf-16", "replace"))
        return found
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _size(value: object, known: dict[int, float]) -> float:
    """Values with references followed; infinite where one leads to itself."""
    # no tuples made here: what is made for a moment may share its id with what comes later
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if not isinstance(inner, list | tuple | set):
        return 1
    if id(value) not in known:
        known[id(value)] = float("inf")
        known[id(value)] = 1 + sum(_size(each, known) for each in inner)
    return known[id(value)]
