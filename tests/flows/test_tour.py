"""The tour quotes the code as it is."""

import re
import textwrap
from pathlib import Path

import flows

ROOT = Path(flows.__file__).parents[1]
STOP = re.compile(r"^## \d+\. [^\n]*`([\w/.]+)`\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)


def test_each_of_ten_stops_quotes_a_few_current_lines_of_its_file():
    tour = (ROOT / "docs/explanation/tour.md").read_text(encoding="utf-8")
    stops = STOP.findall(tour)
    assert len(stops) == len({path for path, _ in stops}) == 10
    for path, text in stops:
        quotes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert quotes, path
        named = [path, *re.findall(r"`([\w/]+\.py)`", text)]
        sources = [read(name) for name in named]
        for quoted in quotes:
            lines = quoted.rstrip().split("\n")
            assert 2 < len(lines) < 20, path
            assert any(holds(source, lines) for source in sources), (
                f"{' and '.join(named)} no longer hold the lines that the tour quotes: {lines[0]}"
            )


def read(name):
    """The lines of a file by its path from the root, or within kernels_eval."""
    path = ROOT / name if (ROOT / name).is_file() else ROOT / "kernels_eval" / name
    return path.read_text(encoding="utf-8").split("\n")


def holds(source, lines):
    windows = (source[at : at + len(lines)] for at in range(len(source)))
    return any(textwrap.dedent("\n".join(window)).split("\n") == lines for window in windows)
