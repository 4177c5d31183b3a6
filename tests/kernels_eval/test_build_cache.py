"""The build cache: folders written once, under many processes, under SIGKILL, under its limit and
on a full disk. Most libraries here are a few bytes."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels_eval.compile import prepared
from kernels_eval.compile import process as process_module
from kernels_eval.compile.cache import (
    BLOCK_BYTES,
    KEEP_S,
    STALE_S,
    BuildCache,
    limit_from_environment,
)
from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.prepared import PRECOMPILED_KEPT_S, Prepared
from kernels_eval.compile.process import WorkRoot, raise_if_full, rename_into_place
from kernels_eval.config import BuildConfig
from kernels_eval.errors import DiskFullError, UsageError
from kernels_eval.evaluator import Evaluator
from kernels_eval.records import stable_hash
from kernels_eval.source.spec import Build, ExtensionSpec
from kernels_eval.toolchain import Toolchain
from tests.support import kernels
from tests.support.kernels import AFFINE, UNTIMED, load_inline, module

LIBRARY_BYTES = 6 * BLOCK_BYTES
ENTRY_BYTES = LIBRARY_BYTES + 2 * BLOCK_BYTES  # with its record and its folder
FAILED = {"ok": False, "reason": "build_failed"}


def key(number):
    return stable_hash(["build", number])


def content(of, size=LIBRARY_BYTES):
    return (of.encode() * (size // len(of) + 1))[:size]


def store(cache, number, scratch, size=LIBRARY_BYTES):
    library = scratch / f"{uuid.uuid4().hex}.so"
    library.write_bytes(content(key(number), size))
    try:
        return cache.store(key(number), Build(ok=True, key=key(number), path=str(library)))
    finally:
        library.unlink()


def used_before(cache, number, seconds):
    then = time.time() - seconds
    os.utime(cache.root / key(number)[:2] / key(number), (then, then))


def held(cache, numbers):
    """Which are there, asked without using them."""
    return [number for number in numbers if (cache.root / key(number)[:2] / key(number)).exists()]


def assert_whole(cache, size=LIBRARY_BYTES):
    """Every entry that can be seen is complete. Returns how many there are."""
    entries = list(cache.root.glob("??/*"))
    for entry in entries:
        build = cache.find(entry.name)
        assert build is not None and build.ok
        assert Path(build.path).read_bytes() == content(entry.name, size)
    return len(entries)


def staged(cache):
    return list((cache.root / ".staging").iterdir())


@pytest.fixture
def cache(tmp_path):
    """Room for twenty entries."""
    return BuildCache(tmp_path / "cache", limit_bytes=20 * ENTRY_BYTES)


@pytest.fixture
def later(cache):
    """The cache as another process opens it."""
    return lambda: BuildCache(cache.cache, cache.limit_bytes)


# -- what is kept ----------------------------------------------------------------------------------


def test_what_is_stored_is_found_and_nothing_else(cache, tmp_path, later):
    assert cache.find(key(0)) is None
    stored = store(cache, 0, tmp_path)
    found = later().find(key(0))
    assert found == stored.model_copy(update={"cached": True}) and not stored.cached
    assert Path(stored.path).read_bytes() == content(key(0))
    assert cache.find(key(1)) is None
    failed = Build(key=key(1), log="no", **FAILED)
    assert cache.store(key(1), failed) == failed
    assert cache.find(key(1)) == failed.model_copy(update={"cached": True})
    assert cache.usage() == (2, ENTRY_BYTES + 2 * BLOCK_BYTES)


def test_who_comes_second_gets_what_the_first_has_kept(cache, tmp_path):
    first = store(cache, 0, tmp_path)
    inode = Path(first.path).stat().st_ino
    second = cache.store(key(0), Build(key=key(0), seconds=3.0, **FAILED))
    assert second.ok and second.path == first.path and not second.cached and second.seconds == 3.0
    assert Path(first.path).stat().st_ino == inode
    assert staged(cache) == []


@pytest.mark.parametrize("record", [None, "", "{}", '{"ok": true, "unknown": 1}'])
def test_what_this_version_cannot_read_is_built_again(cache, tmp_path, record):
    kept = Path(store(cache, 0, tmp_path).path).parent / "build.json"
    kept.unlink() if record is None else kept.write_text(record)
    assert cache.find(key(0)) is None
    store(cache, 0, tmp_path)
    assert assert_whole(cache) == 1 and staged(cache) == []


@pytest.mark.parametrize("folder", [True, False])
def test_what_was_made_on_another_file_system_comes_into_place_whole(tmp_path, folder):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if os.stat(memory).st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs a second file system")
        staging, target = Path(memory) / "staging", tmp_path / "target"
        if folder:
            staging.mkdir()
        ((staging / "a") if folder else staging).write_text("made")
        rename_into_place(staging, target)
        assert ((target / "a") if folder else target).read_text() == "made" and not staging.exists()
        assert [path.name for path in tmp_path.iterdir()] == ["target"]


# -- the limit -------------------------------------------------------------------------------------


def fill(cache, scratch, count=30):
    """Entries of which a smaller number was used longer ago, all longer than they are kept."""
    for number in range(count):
        store(cache, number, scratch)
        used_before(cache, number, 2 * KEEP_S - number)


def test_a_new_process_removes_what_was_used_longest_ago(cache, tmp_path, later):
    fill(cache, tmp_path)
    assert held(cache, range(30)) == list(range(30)), "who stores on does not look again"
    assert cache.find(key(0)) is not None
    paths = [cache.root / key(1)[:2] / key(1) / "x.so", tmp_path / "gone" / "x.so"]
    cache.renew(map(str, paths))
    store(later(), 30, tmp_path)
    assert held(cache, range(31)) == [0, 1, *range(16, 31)], "16 of 20, and the new one"
    assert assert_whole(cache) == 17 and staged(cache) == []


def test_what_was_just_used_stays_even_above_the_limit(cache, tmp_path, later):
    for number in range(40):
        store(cache, number, tmp_path)
    used_before(cache, 3, KEEP_S - 60)
    used_before(cache, 7, KEEP_S + 60)
    store(later(), 40, tmp_path)
    assert held(cache, range(41)) == [number for number in range(41) if number != 7]


def test_failed_builds_count_and_go_too(cache, tmp_path, later):
    for number in range(100):
        cache.store(key(number), Build(key=key(number), log="x" * 3000, **FAILED))
        used_before(cache, number, 2 * KEEP_S - number)
    assert cache.usage() == (100, 100 * 2 * BLOCK_BYTES)
    store(later(), 100, tmp_path)
    kept = held(cache, range(101))
    assert kept == list(range(101 - len(kept), 101)) and len(kept) == 65


def test_without_a_limit_nothing_goes(tmp_path):
    cache = BuildCache(tmp_path / "cache", limit_bytes=0)
    fill(cache, tmp_path)
    store(BuildCache(tmp_path / "cache", limit_bytes=0), 30, tmp_path)
    assert held(cache, range(31)) == list(range(31))


# -- many processes, and SIGKILL -------------------------------------------------------------------

COMMON = """
import os, random, signal, sys, uuid
from pathlib import Path
from kernels_eval.compile import cache as cache_module
from kernels_eval.compile.cache import BuildCache
from kernels_eval.source.spec import Build
from kernels_eval.records import stable_hash

root, limit_bytes, size, seed = Path(sys.argv[1]), *map(int, sys.argv[2:5])
cache = BuildCache(root, limit_bytes=limit_bytes)
scratch = root.parent / f"scratch-{uuid.uuid4().hex}.so"

def key(number):
    return stable_hash(["build", number])

def content(of):
    return (of.encode() * (size // len(of) + 1))[:size]

def store(number):
    scratch.write_bytes(content(key(number)))
    return cache.store(key(number), Build(ok=True, key=key(number), path=str(scratch)))
"""


def process(body, cache, *, size=LIBRARY_BYTES, seed=0):
    told = map(str, (cache.cache, cache.limit_bytes, size, seed))
    command = [sys.executable, "-c", COMMON + textwrap.dedent(body), *told]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_processes_that_store_and_evict_at_once_see_whole_entries_only(cache):
    """Nothing is kept for half an hour here, so that entries come and go under those who look."""
    body = """
    cache_module.KEEP_S = 0
    draw, found, evicted = random.Random(seed), 0, 0
    sys.stdin.readline()
    for turn in range(300):
        number = draw.randrange(60)
        build = cache.find(key(number))
        found += build is not None
        build = build or store(number)
        assert build.ok, build
        try:
            seen = Path(build.path).read_bytes()
        except FileNotFoundError:
            continue
        assert seen == content(key(number)), number
        evicted += cache.trim() if turn % 10 == 0 else 0
    print(found, evicted)
    """
    workers = [process(body, cache, seed=seed) for seed in range(3)]
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 3
    found, evicted = (sum(int(answer.split()[column]) for answer in answers) for column in (0, 1))
    assert found > 50 and evicted > 50, "both happened, often"
    assert assert_whole(cache) > 0
    assert staged(cache) == []


KILLED = {
    "before a library is whole": ("shutil.copyfile", "lambda *_: (half(), die())", [0]),
    "before it is in place": ("os.rename", "lambda *_: die()", [0]),
    "after it is in place": ("_absolute", "lambda *_: die()", [0, 100]),
}


@pytest.mark.parametrize("moment", KILLED)
def test_killed_at_any_moment_nothing_half_is_seen(cache, tmp_path, later, moment):
    patched, by, kept = KILLED[moment]
    store(cache, 0, tmp_path)
    body = f"""
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    def half():
        [staging] = (cache.root / ".staging").iterdir()
        (staging / "half.so").write_bytes(b"half")
    cache_module.{patched} = {by}
    store(100)
    """
    worker = process(body, cache)
    worker.communicate()
    assert worker.returncode == -signal.SIGKILL
    assert held(cache, [0, 100]) == kept and assert_whole(cache) == len(kept)
    left = staged(cache)
    assert len(left) == (0 if 100 in kept else 1)
    store(later(), 101, tmp_path)
    assert staged(cache) == left, "its owner may live, on another machine"
    for path in left:
        os.utime(path, (time.time() - STALE_S - 60,) * 2)
    store(later(), 102, tmp_path)
    assert staged(cache) == []
    store(later(), 100, tmp_path)
    assert assert_whole(cache) == 4


# -- a full disk -----------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """Makes a disk of so many megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(size_mb):
        if not shutil.which("mount"):
            pytest.skip("there is no mount command")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        return folder

    yield mounted
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_what_finds_no_room_is_a_full_disk_and_leaves_nothing_half(disk, tmp_path):
    root = disk(16)
    cache = BuildCache(root)
    for number in range(3):
        store(cache, number, tmp_path, 1 << 20)
    with pytest.raises(DiskFullError) as fault:
        store(cache, 3, tmp_path, 20 << 20)
    assert str(root) in str(fault.value.args[0]) and "No space left" in str(fault.value)
    assert "CONCUR_CACHE" in fault.value.hint
    assert cache.find(key(3)) is None and staged(cache) == []
    assert assert_whole(cache, 1 << 20) == 3


def sources(object_mb, name="plain_ext"):
    """Plain C++ without torch, which compiles in a moment, to an object of so many megabytes."""
    text = f'extern "C" char filler[{object_mb} << 20] = {{1}};\n'
    return ExtensionSpec(kind="files", name=name, files=(("plain.cpp", text),))


@pytest.mark.parametrize(
    "disk_mb, object_mb", [(16, 32), (96, 128)], ids=["little is free", "much is free again"]
)
def test_a_build_that_fills_the_disk_is_not_the_candidates_fault(disk, disk_mb, object_mb):
    builder = Builder(BuildConfig(), cache=disk(disk_mb))
    with pytest.raises(DiskFullError) as fault:
        builder.build(sources(object_mb))
    assert "CONCUR_CACHE" in fault.value.hint
    assert builder.cached(sources(object_mb)) is None and builder.cache.usage().entries == 0
    assert list(builder.work_root.glob("build-*")) == []
    assert builder.build(sources(1)).ok, "the same disk does for what is small"


@pytest.mark.parametrize(
    "free_mb, log, is_full",
    [
        (10, "plain.cpp:1: error: expected ';'", True),
        (1000, "plain.cpp:1: error: expected ';'", False),
        (1000, "final link failed: No space left on device", True),
        (1000, "fatal error: error closing plain.o: Disk quota exceeded", True),
        (1000, "", True),
        (3000, "final link failed: No space left on device", False),
    ],
)
def test_what_is_free_decides_and_a_log_only_raises_suspicion(
    tmp_path, monkeypatch, free_mb, log, is_full
):
    monkeypatch.setattr(
        process_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_mb << 20)
    )
    with pytest.raises(DiskFullError) if is_full else nullcontext():
        raise_if_full(tmp_path, log)


def test_a_quota_shows_in_an_attempt_to_write(tmp_path, monkeypatch):
    def over_quota(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(
        process_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40)
    )
    monkeypatch.setattr(process_module.os, "posix_fallocate", over_quota)
    raise_if_full(tmp_path, "plain.cpp:1: error: expected ';'")
    with pytest.raises(DiskFullError):
        raise_if_full(tmp_path, "fatal error: error closing plain.o: Disk quota exceeded")


def test_a_source_cannot_pretend_that_the_disk_is_full(tmp_path):
    if shutil.disk_usage(tmp_path).free < 4 << 30:
        pytest.skip("the disk is nearly full indeed")
    builder = Builder(BuildConfig(), cache=tmp_path / "cache")
    pretending = ExtensionSpec(
        kind="files", name="plain_ext", files=(("plain.cpp", "#error No space left on device\n"),)
    )
    build = builder.build(pretending)
    assert not build.ok and build.reason == "build_failed" and "No space left" in build.log
    assert builder.cached(pretending) is not None


# -- those who use it ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_library_that_goes_before_the_run_is_built_again():
    source = f"// {uuid.uuid4()}\ntorch::Tensor affine(torch::Tensor x) {{ return x * 2.0 + 1.0; }}"
    code = module("return ext.affine(x)", extension=load_inline(source, name="evicted_ext"))
    asked = kernels.candidate(AFFINE, code)

    with Evaluator("cpu", UNTIMED) as evaluator:
        preparer, runner = evaluator.preparer, evaluator
        made = preparer.prepare(asked)
        assert made.finding is None, made.finding
        [library] = made.libraries.values()
        old = time.time() - 2 * KEEP_S
        os.utime(Path(library).parent, (old, old))
        verdict = runner.run(AFFINE, asked, made)
        assert (verdict.reason, verdict.custom_kernels) == ("ok", ("affine",)), verdict.detail
        assert Path(library).parent.stat().st_mtime > old + KEEP_S, (
            "a path that is given to a candidate counts as used"
        )
        before = Path(library).stat().st_ino
        shutil.rmtree(Path(library).parent)
        again = runner.run(AFFINE, asked, made)
        assert (again.reason, again.custom_kernels) == ("ok", ("affine",)), again.detail
        assert (again.build_tier, again.flags) == (verdict.build_tier, verdict.flags)
        assert Path(library).exists() and Path(library).stat().st_ino != before
        shutil.rmtree(Path(library).parent)


def test_precompiled_headers_that_nobody_uses_go_when_another_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "FULL_BUILDS_WITHOUT", 0)
    monkeypatch.setattr(
        Prepared, "compile", lambda self, what, command, target: target.write_bytes(b"header")
    )
    mine = Prepared(Toolchain(tmp_path), WorkRoot(tmp_path))
    if not mine.tools.is_gcc:
        pytest.skip("only GCC precompiles here")
    others = {
        name: tmp_path / "headers" / name / "full/torch/extension.h.gch"
        for name in ("unused", "used")
    }
    for name, header in others.items():
        header.parent.mkdir(parents=True)
        header.write_bytes(b"header")
        then = time.time() - PRECOMPILED_KEPT_S + (60 if name == "used" else -60)
        os.utime(header, (then, then))
    mine.precompiled()
    assert others["used"].exists() and not others["unused"].exists()
    header = mine.full_headers() / "torch/extension.h.gch"
    os.utime(header, (1, 1))
    mine.precompiled()
    assert header.stat().st_mtime > time.time() - 60, "its use is noted"


@pytest.mark.parametrize(
    "given, limit_bytes", [(None, 20 << 30), ("0", 0), (str(1 << 30), 1 << 30)]
)
def test_the_limit_comes_from_the_environment(monkeypatch, tmp_path, given, limit_bytes):
    monkeypatch.delenv("CONCUR_CACHE_BYTES", raising=False)
    if given is not None:
        monkeypatch.setenv("CONCUR_CACHE_BYTES", given)
    assert (
        limit_from_environment()
        == Builder(BuildConfig(), cache=tmp_path).cache.limit_bytes
        == limit_bytes
    )


@pytest.mark.parametrize("given", ["20", "20G", "-1", "", "1e9"])
def test_a_limit_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv("CONCUR_CACHE_BYTES", given)
    with pytest.raises(UsageError) as fault:
        limit_from_environment()
    assert "bytes" in fault.value.hint
