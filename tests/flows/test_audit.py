"""`make audit`, without the network: what is not pinned, pinned otherwise or not looked up is
told."""

import json

import pytest

from tests.support.audit import CONSTRAINTS, EXTRAS, advisories, differences, needed, pins


def test_every_distribution_that_is_needed_here_is_pinned():
    installed = needed("concur", ("train", "dev"))
    assert {
        "torch",
        "prefect",
        "mlflow",
        "pytest",
        "pydantic-core",
        "starlette",
    } <= installed.keys()  # also through others
    pinned = pins(CONSTRAINTS.read_text(encoding="utf-8"))
    assert [name for name in installed if name not in pinned and installed[name] is not None] == []
    assert "playwright" in pinned and "browser" in EXTRAS


def test_differences_are_told():
    assert differences(
        {"a": "1.0", "b": "2", "t": "2.1"},
        {"a": "1.0", "b": "3", "c": "1", "d": None, "t": "2.1+cpu"},
    ) == ["b is 3, pinned is 2", "c 1 is needed and not pinned", "d is needed and not installed"]
    assert pins("# words\nA_b==1.0  # why\nc == 2 ; python_version > '3'\n") == {
        "a-b": "1.0",
        "c": "2",
    }
    with pytest.raises(ValueError, match="pins no version"):
        pins("a>=1")


def test_what_pip_audit_could_not_look_up_is_not_taken_for_safe():
    found = {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    report = {
        "dependencies": [
            found,
            {"name": "b", "version": "1", "vulns": []},
            {"name": "c", "skip_reason": "not found"},
        ]
    }
    assert advisories(json.dumps(report)) == (["a 1: CVE-1"], 2, 1)
