"""The lock on the code behind version constants: this checkout keeps it, and it notices edits."""

import json

import pytest

import kernels_eval.versions
from tasks import versions
from tasks.store.identity import source_files
from tests.support import protocol_lock

LOGIC = "LIMIT = 3\n\n\ndef holds(x: int) -> bool:\n    '''Says so.'''\n    return x > LIMIT\n"


def test_the_code_is_the_locked_code():
    found = protocol_lock.changes(protocol_lock.read_lock(), protocol_lock.current())
    if found:
        pytest.fail(protocol_lock.INSTRUCTION.format(changes="\n".join(map(str, found))))


def test_every_constant_has_code_that_exists_and_every_stage_has_constants():
    constants = {name for name in vars(versions) if name.endswith("_VERSION")}
    assert constants | {"PROTOCOL_VERSION"} == set(versions.LOGIC)
    assert {name for names in versions.STAGES.values() for name in names} <= set(versions.LOGIC)
    for modules in versions.LOGIC.values():
        assert all(source_files(module) for module in modules)


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A locked checkout of one package; returns its one module."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "locked_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rule.py").write_text(LOGIC)
    monkeypatch.setattr(protocol_lock, "ROOT", tmp_path)
    monkeypatch.setattr(protocol_lock, "HEADERS", {})
    monkeypatch.setattr(protocol_lock, "LOGIC", {"PROTOCOL_VERSION": ("locked_package",)})
    assert protocol_lock.main(["--unchanged", "the first lock"], tmp_path / "lock.json") == 0
    return package / "rule.py"


def run(code, *arguments):
    return protocol_lock.main(list(arguments), code.parents[1] / "lock.json")


def test_an_edit_is_confirmed_or_the_version_raised(code, capsys, monkeypatch):
    code.write_text(LOGIC.replace("Says so.", "Says so, better.") + "# why\n")
    assert run(code) == 0, "docstrings and comments do not count"
    code.write_text(LOGIC.replace("x >", "x >="))
    assert run(code) == run(code, "--raised") == 1, "--raised alone confirms nothing"
    told = capsys.readouterr().err
    assert "PROTOCOL_VERSION (not raised): locked_package/rule.py" in told
    assert '--unchanged "why' in told
    assert run(code, "--unchanged", "equal is excluded before") == run(code) == 0
    lock = json.loads((code.parents[1] / "lock.json").read_text())
    assert [entry["reason"] for entry in lock["confirmed"]] == [
        "the first lock",
        "equal is excluded before",
    ]
    code.write_text(LOGIC)
    monkeypatch.setattr(kernels_eval.versions, "PROTOCOL_VERSION", 99)
    assert run(code) == 1 and "(raised)" in capsys.readouterr().err
    assert run(code, "--raised") == run(code) == 0


def test_a_moved_file_is_no_change_and_a_removed_one_is(code):
    inner = code.parent / "inner"
    inner.mkdir()
    (inner / "rule.py").write_text(code.read_text())
    code.unlink()
    assert run(code) == 0
    (inner / "rule.py").unlink()
    assert run(code) == 1


def test_headers_count_by_their_bytes(code, monkeypatch):
    headers = code.parent / "headers"
    headers.mkdir()
    (headers / "lite.h").write_text("int x;")
    monkeypatch.setattr(protocol_lock, "HEADERS", {"PROTOCOL_VERSION": headers})
    assert run(code) == 1
    assert run(code, "--unchanged", "a new header") == 0
    (headers / "lite.h").write_text("int y;")
    assert run(code) == 1
