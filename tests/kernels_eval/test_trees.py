"""Folders as candidates may leave them: gone afterwards, whatever is in them, and nothing else."""

import os
import socket
from contextlib import chdir

import pytest

from kernels_eval.sandbox import trees
from kernels_eval.sandbox.trees import below, disk_usage, named, remove_tree, temporary_tree

LONG = "n" * 255


def deep(folder, depth, name="deep"):
    """Nested folders, made from within: no path of them is ever longer than its name."""
    with chdir(folder):
        for _ in range(depth):
            os.mkdir(name)
            os.chdir(name)
        open("bottom", "w").close()


def nested(folder):
    deep(folder, 3000)


def longer_than_path_max(folder):
    for name in (LONG, "b" * 255):
        deep(folder, 40, name)


def closed(folder):
    for mode in (0, 0o111, 0o444, 0o555):
        inner = folder / f"closed{mode}"
        deep_in = inner / "inner"
        deep_in.mkdir(parents=True)
        (deep_in / "file").touch(mode=0)
        deep_in.chmod(mode)
        inner.chmod(mode)


def strange_names(folder):
    names = [b"\xff\xfe", b"new\nline", b"-rf", b"* ?", "⁠é".encode(), b"\x01", b"x" * 255]
    for name in names:
        os.mkdir(os.path.join(os.fsencode(folder), name))
        open(os.path.join(os.fsencode(folder), name, b"file" + name[:200]), "w").close()


def special_files(folder):
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as made, chdir(folder):
        made.bind("socket")


def links(folder):
    outside = folder.parent / "outside"
    (folder / "to_folder").symlink_to(outside)
    (folder / "to_file").symlink_to(outside / "kept")
    (folder / "to_nothing").symlink_to("nowhere")
    (folder / "to_itself").symlink_to("to_itself")
    (folder / "up").symlink_to("..")
    os.link(outside / "kept", folder / "hard")


def wide(folder):
    for number in range(2000):
        (folder / str(number)).mkdir()


LEFT = [nested, longer_than_path_max, closed, strange_names, special_files, links, wide]


@pytest.mark.parametrize("leave", LEFT)
def test_whatever_was_left_goes_and_nothing_else(tmp_path, leave):
    outside, folder = tmp_path / "outside", tmp_path / "left"
    outside.mkdir(mode=0o750)
    (outside / "kept").write_text("kept")
    folder.mkdir()
    leave(folder)
    before = len(os.listdir("/proc/self/fd"))
    remove_tree(folder)
    assert os.listdir(tmp_path) == ["outside"] and (outside / "kept").read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o750, "what a link leads to keeps its rights"
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_more_descriptors_than_three_are_needed(tmp_path, monkeypatch):
    most, opened = 0, os.open

    def watched(*args, **kwargs):
        nonlocal most
        found = opened(*args, **kwargs)
        most = max(most, len(os.listdir("/proc/self/fd")))
        return found

    (tmp_path / "left").mkdir()
    deep(tmp_path / "left", 100)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(trees.os, "open", watched)
    remove_tree(tmp_path / "left")
    assert before < most <= before + 3


def test_nothing_and_what_is_no_folder_stay_as_they_are(tmp_path):
    file, link, folder = tmp_path / "file", tmp_path / "link", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    link.symlink_to(folder)
    for path in (tmp_path / "missing", file, link):
        remove_tree(path)
    assert file.exists() and link.is_symlink() and folder.exists()


def test_a_folder_that_is_moved_meanwhile_leads_nowhere_else(tmp_path, monkeypatch):
    """Its ".." is then another folder, whose content is not ours."""
    left, elsewhere = tmp_path / "left", tmp_path / "elsewhere"
    (left / "a/b").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    listed = trees._unlinked_files

    def moved(folder):
        names = listed(folder)
        if not names:  # in `b`
            (left / "a/b").rename(elsewhere / "b")
        return names

    monkeypatch.setattr(trees, "_unlinked_files", moved)
    remove_tree(left)
    assert sorted(os.listdir(elsewhere)) == ["b", "kept"]


def test_a_temporary_folder_goes_after_an_error_too(tmp_path):
    with pytest.raises(RuntimeError), temporary_tree("held-", tmp_path) as folder:
        deep(folder, 1500)
        raise RuntimeError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("leave", [nested, longer_than_path_max])
def test_what_lies_below_a_path_that_is_too_long_counts_as_too_much(tmp_path, leave):
    leave(tmp_path)
    assert disk_usage(tmp_path, 100_000)[1] > 100_000
    remove_tree(tmp_path)


def test_what_is_below_is_listed_at_any_depth(tmp_path):
    nested(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.json").touch()
    (tmp_path / "two.json").symlink_to("a/one.json")
    (tmp_path / "loop.json").symlink_to(".")
    assert named(tmp_path, "*.json") == [tmp_path / "a/one.json", tmp_path / "two.json"]
    depth = max(entry.path.count("/deep") for entry in below(tmp_path))
    assert depth > 700, "as far as a path may be long"
    remove_tree(tmp_path)


def test_bytes_and_files_are_counted_and_links_are_not_followed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_bytes(bytes(1 << 20))
    (tmp_path / "link").symlink_to("/")
    size, count = disk_usage(tmp_path, 10)
    assert count == 3 and 1 << 20 <= size < 2 << 20
    assert disk_usage(tmp_path, 2)[1] > 2
    assert disk_usage(tmp_path / "gone", 2) == (0, 0)
