"""Print the size of the code: tokens (names, numbers, strings, operators) and function lengths.

    python -m tests.support.size [--functions]

Bundled tasks are data and left out. An f-string counts as one string, as Python 3.11 tokenises it:
on later versions its parts are counted together.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tokenize
from collections import Counter
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).parents[2]
PLACES = ("kernels_eval", "tasks", "flows", "tests", "benchmarks", "docs")
DATA = "tasks/sources/bundled/tasks/"
KINDS = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="list the longest functions, too")
    asked = parser.parse_args()
    files = python_files()
    tokens: Counter[str] = Counter()
    for name in files:
        count = tokens_of(ROOT / name)
        parts = name.split("/")
        tokens[parts[0]] += count
        if len(parts) > 2:
            tokens["/".join(parts[:2])] += count
    for place, count in sorted(tokens.items()):
        print(f"{count:>9,}  {place}")
    product = [name for name in files if name.split("/")[0] in PLACES[:3]]
    total = sum(tokens[place] for place in PLACES[:3])
    lengths = sorted((pair for name in product for pair in functions_of(name)), reverse=True)
    p90 = quantiles([length for length, _ in lengths], n=10)[-1]
    print(f"{total:>9,}  the three packages, in {len(product)} files")
    print(f"{p90:>9.0f}  lines: 90th percentile of {len(lengths):,} functions")
    for length, name in lengths[:20] if asked.functions else ():
        print(f"{length:>9}  {name}")


def python_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        name
        for name in listed.stdout.split()
        if name.split("/")[0] in PLACES and not name.startswith(DATA)
    ]


def tokens_of(path: Path) -> int:
    """Count the tokens of a file. Parts of an f-string (Python 3.12) are one."""
    count = depth = 0
    with path.open(encoding="utf-8") as handle:
        for token in tokenize.generate_tokens(handle.readline):
            kind = tokenize.tok_name[token.type]
            depth -= kind == "FSTRING_END"
            count += depth == 0 and (token.type in KINDS or kind == "FSTRING_END")
            depth += kind == "FSTRING_START"
    return count


def functions_of(name: str) -> list[tuple[int, str]]:
    """Length in lines and place of each function of a file."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.lineno} {node.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


if __name__ == "__main__":
    main()
