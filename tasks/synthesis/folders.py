"""Folders of kernels as people have them: KernelBench's runs, a file or a folder for each task,
levels, and answers as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.exchange import kernelbench
from kernels_eval.records import Json
from tasks.progress import caution
from tasks.sources.files import read_text, shown

DEPTHS = (("*", "level*/*"), ("*/*",), ("*/*/*",), ("*/*/*/*",))
"""Where files are looked for: the first of these that has more than references is read last."""
SUFFIXES = (".py", ".txt", ".md")
READ = (
    "read are FILE.py named as its task, TASK/FILE.py, TASK/code/kernel_0.py, level1/3_NAME.py,"
    " level_1_problem_3_sample_0_kernel.py, the same with .txt or .md for whole answers, and"
    " tables (JSON files as a glob: 'DIR/*.json')"
)
_SAMPLE = r"(?:_sample_?(?P<sample_index>\d+))?(?:_kernel)?"
_NUMBERED = re.compile(
    r"(?:(?:[a-z]+_)?level_?(?P<level>\d+)_)?problem_?(?P<problem_id>\d+)" + _SAMPLE
)
_NAMED = re.compile(r"(?P<task_id>.+?)" + _SAMPLE)
_ANONYMOUS = re.compile(
    r"(?:(?:model_?new|(?:candidate|kernel|solution|answer|response|completion|output|sample|code"
    r"|generation|result)s?|src|(?:generated|optimi[sz]ed|best|final)(?:_?(?:code|kernel|solution))?|baseline\w*"
    r"|ref|reference|original|problem|task)"
    r"|(?:(?:candidate|kernel|solution|answer|response|completion|output|generated|sample|attempt)"
    r"[ _-]?)?(?P<sample_index>\d+))(?:_kernel)?",
    re.IGNORECASE,
)
"""Files, and folders in a task's, that do not name their task, which a folder above names."""
_REFERENCE = re.compile(r"ref|reference|original|problem|task", re.IGNORECASE)
"""Of several programs in a folder the one that the others answer; it comes first."""
_NO_ANSWER = re.compile(r"prompt|readme|requirements|license|log", re.IGNORECASE)
_LEVEL = re.compile(r"level[_-]?(\d+)", re.IGNORECASE)
_LEVEL_LINE = re.compile(r"^level:\s*(\d+)", re.MULTILINE)


def has_modules(folder: Path) -> bool:
    return bool(_files(folder, ".py"))


def rows_of_modules(path: Path, references: bool) -> Iterator[Json]:
    """A row for each candidate of a .py file or a folder, and with `references` for each program
    that they answer. Raises UsageError where there is none."""
    alone = path.suffix in SUFFIXES
    found = [path] if alone else next(filter(None, (_files(path, each) for each in SUFFIXES)), [])
    answers = [file for file in found if file.parent == path or not _is_reference(file)]
    files = found if references else answers or found
    if not files:
        raise _nothing_in(path)
    if not alone and (deeper := _deeper(path, found)):
        caution(
            f"{deeper} files in folders are left out, as others are nearer the top: keep all at one"
            " depth"
        )
    kind = files[0].suffix
    others = [each for suffix in SUFFIXES if suffix != kind for each in _files(path, suffix)]
    if not alone and others:
        caution(
            f"{len(others)} files that are not {kind}, such as {shown(others[0].name)}, are left"
            " out: keep answers as text in a folder of their own"
        )
    named = [(file, _place(file, path)) for file in files]
    samples = [(file, place) for file, place in named if _NUMBERED.fullmatch(file.stem)]
    if left_out := samples and len(files) - len(samples):
        caution(f"{left_out} files are left out: they are not named as KernelBench's samples")
    for file, place in samples or named:
        kind = "code" if file.suffix == ".py" else "response"
        yield {"candidate_id": _name(file, path), **place, kind: read_text(file)}


def _files(folder: Path, suffix: str) -> list[Path]:
    found: list[Path] = []
    for patterns in DEPTHS:
        found += _matches(folder, patterns, suffix)
        if not all(map(_is_reference, found)):
            break
    return sorted(dict.fromkeys(found), key=lambda file: (not _is_reference(file), file))


def _deeper(folder: Path, found: Sequence[Path]) -> int:
    """How many files of the same kind the depths below those of `found` have."""
    suffix = found[0].suffix
    everywhere = {file for patterns in DEPTHS for file in _matches(folder, patterns, suffix)}
    return len(everywhere.difference(found))


def _matches(folder: Path, patterns: Sequence[str], suffix: str) -> list[Path]:
    return [
        file
        for pattern in patterns
        for file in folder.glob(pattern + suffix)
        if file.is_file()
        and not any(part[0] in "._" for part in file.relative_to(folder).parts)
        and not (suffix != ".py" and _NO_ANSWER.search(file.stem))
    ]


def _is_reference(file: Path) -> bool:
    return _REFERENCE.fullmatch(file.stem) is not None


def _name(file: Path, root: Path) -> str:
    below = Path(file.name) if file == root else file.relative_to(root)
    return below.with_suffix("").as_posix().encode("utf-8", "replace").decode()


def _place(file: Path, root: Path) -> Json:
    *folders, name = _name(file, root).split("/")
    own = root.resolve().name if file != root else ""
    sample: Json = {}
    while folders and not _LEVEL.fullmatch(folders[-1]) and (bare := _ANONYMOUS.fullmatch(name)):
        if sample and name.isdecimal():
            break  # a problem's number
        sample = {"sample_index": sample.get("sample_index") or bare["sample_index"]}
        name = folders.pop()
    if found := _NUMBERED.fullmatch(name):
        level = found["level"] or _level_of((own, *folders)) or _noted_level(root)
        if level is None:  # the number, which one of the given tasks may have
            return {"task_id": found["problem_id"], "sample_index": found["sample_index"]} | sample
        return found.groupdict() | {"level": level} | sample
    above = (own, *folders)[-1]
    if (level := _level_of((above,))) and name[:1].isdigit():  # KernelBench's own: level1/3_NAME.py
        named = _NAMED.fullmatch(name)
        index = named["sample_index"] if named else None
        return {"level": level, "problem_id": name, "sample_index": index} | sample
    named = _NAMED.fullmatch(name)
    return (named.groupdict() if named else {"task_id": name}) | sample


def _level_of(folders: Sequence[str]) -> str | None:
    found = [match[1] for name in folders if (match := _LEVEL.search(name))]
    return found[-1] if found else None


def _noted_level(root: Path) -> str | None:
    note = root / kernelbench.CONFIG
    found = _LEVEL_LINE.search(read_text(note)) if note.is_file() else None
    return found[1] if found else None


def _nothing_in(path: Path) -> UsageError:
    scores = [*path.glob("*results*.json*"), *path.glob("*scores*")]
    if scores:
        return UsageError(
            f"{shown(path)} holds scores ({shown(scores[0].name)}) but no kernels to verify",
            f"give the folder with the kernels; {READ}. `concur export --as table` reads scores",
        )
    return UsageError(f"{shown(path)} holds no candidate", READ)
