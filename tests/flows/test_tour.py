"""The tour quotes the code as it is."""

import re
import textwrap
from pathlib import Path

import flows

ROOT = Path(flows.__file__).parents[1]
STOP = re.compile(r"^## \d\. [^\n]*`([\w/.]+)`\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)


def test_each_of_eight_stops_quotes_a_few_current_lines_of_its_file():
    tour = (ROOT / "docs/explanation/tour.md").read_text(encoding="utf-8")
    stops = STOP.findall(tour)
    assert len(stops) == len({path for path, _ in stops}) == 8
    for path, text in stops:
        (quoted,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        lines = quoted.rstrip().split("\n")
        assert 2 < len(lines) < 20, path
        source = (ROOT / path).read_text(encoding="utf-8").split("\n")
        windows = (source[at : at + len(lines)] for at in range(len(source)))
        assert any(textwrap.dedent("\n".join(window)).split("\n") == lines for window in windows), (
            f"{path} no longer holds the lines that the tour quotes"
        )
