"""Print what a reader of the repository meets, each figure beside its budget.

    python -m tests.support.size [--folders] [--functions] [REVISION]

Code lines hold a name, a number or an operator: comments, blank lines and lines of nothing but text
do not count. An f-string counts as one token, as Python 3.11 reads it. Bundled tasks are data and
left out. Without a revision, the files that git lists are read from the working tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple, get_args

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels_eval", "tasks", "flows")
OTHERS = ("tests", "benchmarks", "experiments")
DATA = "tasks/sources/bundled/"
COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.OP)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

BUDGETS = {
    "code lines of the three packages": 30_000,
    "tokens a code line": 7.8,
    "bytes under the three packages": 2_200_000,
    "words of docstrings": 45_000,
    "code lines of kernels_eval": 11_000,
    "code lines of tasks": 14_500,
    "code lines of flows": 4_500,
    "code lines of tests": 25_000,
    "code lines of benchmarks": 3_300,
    "code lines of experiments": 3_500,
    "words of docs": 30_000,
    "bytes of README": 7_000,
    "configuration keys": 160,
}
"""At most, by name of the figure: the owner's decision."""


class Size(NamedTuple):
    """Of one Python file."""

    lines: int
    tokens: int
    words: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", help="a commit instead of the working tree")
    parser.add_argument("--folders", action="store_true", help="list code lines by folder, too")
    parser.add_argument("--functions", action="store_true", help="list the longest functions, too")
    asked = parser.parse_args()
    files = committed(asked.revision) if asked.revision else tracked()
    sizes = {
        name: size_of(text.decode("utf-8", "replace"))
        for name, text in files.items()
        if name.endswith(".py")
    }
    found = figures(files, sizes)
    if not asked.revision:
        found["configuration keys"] = len(configuration_keys())
    for name, value in found.items():
        budget = BUDGETS[name]
        over = "" if value <= budget else f"  {value / budget - 1:.0%} over"
        print(f"{value:>11,.{1 if isinstance(budget, float) else 0}f}  {budget:>11,}  {name}{over}")
    if asked.folders:
        for folder, lines in sorted(lines_by_folder(sizes).items()):
            print(f"{lines:>11,}  {folder}")
    functions = sorted(functions_of(files), reverse=True)
    p90 = quantiles([length for length, _ in functions], n=10)[-1]
    print(f"{p90:>11,.0f}  lines: 90th percentile of {len(functions):,} functions")
    for length, name in functions[:20] if asked.functions else ():
        print(f"{length:>11}  {name}")


def tracked() -> dict[str, bytes]:
    """The content of each tracked file that still exists."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = listed.stdout.decode().split("\0")
    return {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}


def committed(revision: str) -> dict[str, bytes]:
    """The content of each file of a commit."""
    made = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True)
    if made.returncode:
        sys.exit(made.stderr.decode().strip())
    files = {}
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        for member in archive:
            if handle := archive.extractfile(member):
                files[member.name] = handle.read()
    return files


def figures(files: dict[str, bytes], sizes: dict[str, Size]) -> dict[str, float]:
    """The figures that have a budget, by name."""
    product = [name for name in files if is_product(name)]
    code = [sizes[name] for name in product if name in sizes]
    lines = sum(size.lines for size in code)
    by_place: Counter[str] = Counter()
    for name, size in sizes.items():
        if not name.startswith(DATA):
            by_place[name.split("/")[0]] += size.lines
    pages = [name for name in files if name.startswith("docs/") and name.endswith(".md")]
    return {
        "code lines of the three packages": lines,
        "tokens a code line": sum(size.tokens for size in code) / max(lines, 1),
        "bytes under the three packages": sum(len(files[name]) for name in product),
        "words of docstrings": sum(size.words for size in code),
        **{f"code lines of {place}": by_place[place] for place in (*PACKAGES, *OTHERS)},
        "words of docs": sum(len(files[name].split()) for name in pages),
        "bytes of README": len(files.get("README.md", b"")),
    }


def is_product(name: str) -> bool:
    return name.split("/")[0] in PACKAGES and not name.startswith(DATA)


def size_of(source: str) -> Size:
    """Code lines, tokens and words of docstrings of one file."""
    lines: set[int] = set()
    tokens = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        depth -= kind == "FSTRING_END"
        if depth == 0 and token.type in COUNTED:
            lines.update(range(token.start[0], token.end[0] + 1))
            tokens += 1
        elif depth == 0 and kind in ("STRING", "FSTRING_END"):
            tokens += 1
        depth += kind == "FSTRING_START"
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    words = sum(len((ast.get_docstring(node, clean=False) or "").split()) for node in nodes)
    return Size(len(lines), tokens, words)


def lines_by_folder(sizes: dict[str, Size]) -> Counter[str]:
    """Code lines of each folder of two levels, or of a module beside them."""
    found: Counter[str] = Counter()
    for name, size in sizes.items():
        if not name.startswith(DATA):
            found["/".join(name.split("/")[:2])] += size.lines
    return found


def configuration_keys() -> set[str]:
    """The dotted keys that a profile may set."""
    from flows.config import PipelineConfig

    return set(keys_of(PipelineConfig))


def keys_of(model: type, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a pydantic model whose value is no model itself."""
    for name, field in getattr(model, "model_fields", {}).items():
        inner = list(models_in(field.annotation))
        for each in inner:
            yield from keys_of(each, f"{prefix}{name}.")
        if not inner:
            yield prefix + name


def models_in(annotation: object) -> Iterator[type]:
    """The pydantic models of an annotation: `X | None`, `dict[str, X]`, `X` itself."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def functions_of(files: dict[str, bytes]) -> Iterator[tuple[int, str]]:
    """Length in lines and place of each function of the three packages."""
    for name, text in files.items():
        if not is_product(name) or not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{name}:{node.lineno} {node.name}"


if __name__ == "__main__":
    main()
