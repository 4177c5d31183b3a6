"""YAML and JSON of others: values, or a ValueError of one line, in a moment."""

import json

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.rewards import recipe_of
from kernels_eval.settings import load_protocol
from kernels_eval.written import json_of, yaml_of

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
BAD_YAML = {
    "3,000 brackets": "[" * 3000,
    "3,000 mappings": "{a: " * 3000 + "1" + "}" * 3000,
    "references to references": LAUGHS,
    "a reference to itself": "a: &a [*a]",
    "a day that is none": "a: 2026-13-45",
    "a number of 5,000 digits": "a: " + "9" * 5000,
    "a number that is none": "a: !!int x",
    "a truth that is none": "a: !!bool x",
    "a time that is none": "a: !!timestamp x",
    "a key that is a list": "? [a, b]\n: c",
    "an object of Python": "a: !!python/object/apply:os.system [ls]",
    "an anchor that is not there": "a: *b",
    "a NUL": "a: b\0",
    "a tab": "a:\n\t- b",
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_hostile_yaml_is_one_short_error(tmp_path, case):
    with pytest.raises(ValueError) as error:
        yaml_of(BAD_YAML[case])
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    with pytest.raises(UsageError, match="not YAML"):
        load_protocol([f"timing.max_s={BAD_YAML[case]}"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BAD_YAML[case])
    with pytest.raises(UsageError, match="no reward recipe"):
        recipe_of(recipe)


def test_what_people_write_is_read():
    text = "base: &base {a: 1, b: [x, y]}\nmine: {<<: *base, a: 2}\nnone:\n"
    assert yaml_of(text)["mine"] == {"a": 2, "b": ["x", "y"]}
    assert yaml_of("") is None
    large = {"a": {"x": [0] * 60_000}, "b": {"y": 1}, "c": {"z": 2}}
    assert yaml_of(json.dumps(large)) == large, "no value counts twice"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "{", b"\xff", ""])
def test_hostile_json_is_one_short_error(text):
    with pytest.raises(ValueError) as error:
        json_of(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
