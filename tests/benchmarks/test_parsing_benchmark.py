"""Our parser against a recorded extraction: every way in which they can differ is counted once and
listed."""

import json
import sys
from collections import Counter

import polars as pl

from benchmarks import parsing

MODULE = "import torch\n\nclass ModelNew(torch.nn.Module):\n    pass"
DRAFT = MODULE.replace("pass", "draft = 1")
HELPER = "def helper():\n    pass"


def fenced(code):
    return f"```python\n{code}\n```"


ROWS = [
    # response, recorded extraction, kind, recorded as correct
    (f"x</think>\n{fenced(MODULE)}", MODULE, "same", True),
    (
        f"x</think>\n{fenced(MODULE)}".replace("\n", "\r\n"),
        f"\n{MODULE}\r\n".replace("\r\n", "\n").replace("\n", "\r\n"),
        "same",
        False,
    ),
    ("x</think>\nI cannot.", "", "neither", False),
    ("x</think>\nI cannot.", None, "neither", False),
    (f"x</think>\n{fenced(HELPER)}", HELPER, "recorded only: no ModelNew", False),
    (f"{fenced(DRAFT)}\nx</think>\n```python\n{MODULE}", DRAFT, "recorded only: cut off", True),
    (f"{fenced(DRAFT)}\nWait.</think>\nThat is all.", DRAFT, "recorded only: thought on", False),
    (
        f"{fenced(DRAFT)}\nWait.</think>\nThat is all.",
        f"{DRAFT}\n)",
        "recorded only: not Python",
        False,
    ),
    (f"{fenced(DRAFT)}\nWait.</think>\n{fenced(HELPER)}", DRAFT, "recorded only: other", False),
    (f"x</think>\n{fenced(MODULE)}", " \n", "ours only", False),
    (f"x</think>\n{fenced(MODULE)}", HELPER, "both: recorded has no ModelNew", False),
    (
        f"x</think>\n{fenced(MODULE)}",
        f"{MODULE}\n```\nprose",
        "both: recorded is not Python",
        False,
    ),
    (f"{fenced(DRAFT)}</think>\n{fenced(MODULE)}", DRAFT, "both: another module", True),
]


def table():
    count = len(ROWS)
    return pl.DataFrame(
        {
            "level": [1] * count,
            "problem_id": list(range(count, 0, -1)),
            "sample_id": [0] * count,
            "response": [row[0] for row in ROWS],
            "extracted_code": [row[1] for row in ROWS],
            "recorded_correct": [row[3] for row in ROWS],
        }
    )


def responses(path, **changes):
    table().with_columns(**changes).write_parquet(path)
    return path


def test_every_kind_is_told_and_there_is_a_row_for_each():
    for row, (response, _, kind, correct) in zip(table().to_dicts(), ROWS, strict=True):
        compared = parsing.compare(row | {"level": 2, "sample_id": 3})
        found = (compared.row, compared.kind, compared.correct)
        assert found == (f"L2/{row['problem_id']}/3", kind, correct), response
    assert {row[2] for row in ROWS} == {*parsing.SAME, *parsing.GROUPS}


def test_figures_and_lists(tmp_path, monkeypatch, capsys):
    out, recorded = tmp_path / "report.md", responses(tmp_path / "r.parquet")
    argv = ["parsing", "--responses", str(recorded), "--json", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert parsing.main() == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["responses"] == 13
    names = ("with code", "parses as Python", "defines ModelNew", "both")
    assert facts["ours"] == dict.fromkeys(names, 6)
    assert facts["recorded"] == dict(zip(names, (10, 8, 8, 6), strict=True))
    assert facts["kinds"] == Counter(row[2] for row in ROWS)
    assert facts["no_code"] == {"no_code_block": 4, "missing_model_new": 2, "truncated": 1}
    others = {
        f"L1/{len(ROWS) - number}/0": row[3]
        for number, row in enumerate(ROWS)
        if row[2] not in parsing.SAME
    }
    lost = [name for name, correct in others.items() if correct]
    assert facts["recorded_correct"] == 3
    assert sorted(facts["recorded_correct_but_not_the_same"]) == sorted(lost)
    assert {each["row"] for each in facts["different"]} == others.keys()
    text = out.read_text(encoding="utf-8")
    assert "| defines ModelNew | 6 (46.2 %) | 8 (61.5 %) |" in text
    assert "of these not the same: 2" in text
    for each in facts["different"]:
        expected = 1 + (each["row"] in lost)
        assert text.count(f"| {each['row']} |") == expected, (
            "once in its group, and once more if a correct one is concerned"
        )
    assert "That is all" not in text and "draft = 1" not in text, "no word of the responses"


def test_a_finish_reason_in_the_file_wins(tmp_path):
    rows = parsing.read(str(responses(tmp_path / "r.parquet", finish_reason=pl.lit("length"))))
    assert [row["problem_id"] for row in rows] == sorted(row["problem_id"] for row in rows)
    assert all(parsing.compare(row).cut for row in rows)


def test_what_is_wrong_with_the_file_is_one_line(tmp_path, monkeypatch, capsys):
    pl.DataFrame({"level": [1]}).write_parquet(tmp_path / "short.parquet")
    table().clear().write_parquet(tmp_path / "empty.parquet")
    for name, said in (
        ("short", "extracted_code"),
        ("absent", "does not exist"),
        ("empty", "holds no response"),
    ):
        path = tmp_path / f"{name}.parquet"
        monkeypatch.setattr(sys, "argv", ["parsing", "--responses", str(path)])
        assert parsing.main() == 1
        assert said in capsys.readouterr().err
