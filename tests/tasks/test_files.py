"""Atomic replacement: readers and crashes see the old file or the new one."""

import stat
from pathlib import Path

import fsspec
import pytest

from kernels_eval.errors import UsageError
from tasks import files
from tasks.files import (
    atomic_directory,
    atomic_write,
    atomic_write_at,
    explain_write_errors,
)


@pytest.mark.parametrize("content", ["né", "né".encode(), lambda path: path.write_text("né")])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path, content):
    target = tmp_path / "new" / "file.txt"
    for _ in range(2):
        assert atomic_write(target, content) == target
    assert target.read_text(encoding="utf-8") == "né"
    assert list(target.parent.iterdir()) == [target]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    target = atomic_write(tmp_path / "file", "old")

    def fail(path):
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic_write(target, fail)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_secret_is_never_readable_by_others(tmp_path):
    target = atomic_write(tmp_path / "file", "old")
    atomic_write(target, "secret", mode=0o600)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_threads_and_processes_write_under_different_names():
    name = files.temporary_name(Path("dir/file")).name
    assert name.startswith(".file.") and name.endswith(".tmp")
    assert len(name.split(".")) == 5  # .NAME.THREAD.PID.tmp, which garbage collection knows


def test_a_directory_appears_whole(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(ValueError, match="stop"), atomic_directory(target) as folder:
        (folder / "half").touch()
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []
    with atomic_directory(target) as folder:
        (folder / "whole").touch()
        assert not target.exists()
    assert list(target.iterdir()) == [target / "whole"]
    with pytest.raises(OSError), atomic_directory(target):
        pass
    assert list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "one").write_text("a file, not a folder")
    with pytest.raises(UsageError, match=r"cannot write .*one/file.*free some disk"):
        with explain_write_errors(tmp_path / "one" / "file", "free some disk"):
            atomic_write(tmp_path / "one" / "file", "new")


def test_a_remote_file_is_replaced():
    fs, path = fsspec.core.url_to_fs("memory://files/name")
    for text in (b"old", b"new"):
        atomic_write_at(fs, path, lambda handle, text=text: handle.write(text))
    assert fs.cat_file(path) == b"new" and len(fs.ls("/files")) == 1
