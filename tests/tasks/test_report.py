"""The report as its readers meet it: what it says, that strangers' text stays text, and that it
stands alone."""

import functools
import html
import json
import math
import re

import polars as pl
import pytest

from tasks.benchmark.comparing import paired_differences
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.errors import error_groups
from tasks.benchmark.groups import level_groups
from tasks.benchmark.report.content import cautions, headline, summary_table
from tasks.benchmark.report.context import (
    ReportContext,
    TrainingStep,
    speedups_of,
)
from tasks.benchmark.report.figures import figures
from tasks.benchmark.report.files import build_report, to_json, to_markdown
from tasks.benchmark.shown import scores_table
from tasks.benchmark.signs import signs
from tasks.benchmark.stage import all_scores
from tasks.reporting.charts import INK
from tasks.reporting.text import clean
from tasks.scores import scores
from tests.support.cases import cases
from tests.support.hostile_report import hostile_report
from tests.support.pages import HOSTILE, Page, assert_tame, assert_whole_tables
from tests.support.verdict_rows import frame, row

CASES = cases("benchmark")


def verdict(model, task, outcome, tokens=100, number=0):
    """One verdict joined with its candidate: an outcome is a speedup or a reason."""
    log = f"main.cpp:{number}:1: error: '{model}' was not declared in this scope"
    return row(
        model,
        task,
        outcome,
        candidate_id=f"{model}-{task}-{number}",
        detail=f"saw {outcome}",
        log_tail=log if isinstance(outcome, str) else "",
        generator="a model",
        reasoning_tokens=tokens,
        code="int x;",
    )


LINE = [verdict("line", *each) for each in CASES["line"]]
HELD_OUT = [
    verdict(model, f"h{i}", right if i else wrong, number=n)
    for model, right, wrong in CASES["held_out"]
    for i in range(4)
    for n in range(2)
]


def scored(rows, **asked):
    return tuple(all_scores(frame(*rows), BenchmarkConfig(**asked)).to_dicts())


def grouped(rows, members, by="level"):
    joined = members.join(frame(*rows), on="task_id", maintain_order="left_right")
    found = scores(joined, by=("group", "model"), resamples=0)
    return tuple(found.select(pl.lit(by).alias("by"), pl.all()).to_dicts())


@functools.cache
def facts():
    line, held_out = frame(*LINE), frame(*HELD_OUT)
    levels = pl.DataFrame({"task_id": ["h0", "h1", "h2", "h3"], "level": [1, 1, 2, 2]})
    return {
        "run_name": "local",
        "language": "cpp",
        "device": "a CPU",
        "tasks": 3,
        "candidates": 6,
        "status_counts": dict(line["status"].value_counts().iter_rows()),
        "reason_counts": dict(line["reason"].value_counts().iter_rows()),
        "criterion_counts": {"concise_and_fast": 1, "high_speedup": 0},
        "trace_flags": {"repetitive": (2, 1)},
        "base_model": "tiny",
        "history": [{"step": i + 1, "epoch": (i + 1) / 2, "loss": 3.0 - 0.5 * i} for i in range(4)],
        "scores": scored(HELD_OUT),
        "comparisons": tuple(
            paired_differences(held_out, pairs=[("base", "recorded")], resamples=200).to_dicts()
        ),
        "groups": grouped(HELD_OUT, level_groups(levels)),
        "errors": error_groups(held_out),
        "findings": ["Shorter is more often correct.", "A second finding.", "A third finding."],
        "findings_bounded_by": ["Three tasks only."],
        **speedups_of(line),
        "fingerprints": {"verification": "abc123"},
        "tool_versions": {"torch": "2.13"},
        "hardware": {"cpus": 2},
        "config": {"seed": 0},
        "notes": ["a note of the run"],
    }


def context(**changes):
    return ReportContext(**(facts() | changes))


def test_the_report_leads_to_the_viewer_of_its_own_root():
    command = "concur view --root other --open"
    told = context(viewer="file:///other%20root/view/index.html", viewer_command=command)
    page, text = build_report(told), to_markdown(told)
    assert 'href="file:///other%20root/view/index.html"' in page and command in page
    assert command in text and "file:" not in text, "a server shows it"
    assert "href" not in build_report(context(viewer="javascript:alert(1)")).split("What next")[-1]


def hostile():
    """Everything a candidate, a task, a model or a profile can name is hostile at once."""
    return context(**vars(hostile_report(HOSTILE)) | {"history": facts()["history"]})


SAID = """
n/a
0.0 % (0.0 to 63.7)
fast_2
2.00x
recorded minus base
build_failed
concise_and_fast
2.750
4 tasks per model
They say nothing about a GPU
a note of the run
abc123
2.13
repetitive
of these taken
Shorter is more often correct.
A third finding.
not distinguishable from chance
1 of 2 correct, timed candidates
Three tasks only.
"""


# -- what it says ----------------------------------------------------------------------------------


def test_the_summary_is_the_run_in_rows():
    rows = dict(summary_table(context()))
    assert (rows["tasks"], rows["candidates"], rows["curated samples"]) == ("3", "6", "1")
    assert "confirmed candidates" not in rows
    told = {"confirmed": 1, "proposed": 1200}
    rows = dict(summary_table(context(confirmation=told)))
    assert rows["confirmed candidates"] == "1 of 1,200"
    assert rows["status correct"] == "2 (33.3 %)" and rows["status compile_error"] == "2 (33.3 %)"
    assert (rows["curated by concise_and_fast"], rows["curated by high_speedup"]) == ("1", "0")
    told = dict(summary_table(context(choice=("kept 1 of 2 correct", "1 is slower"))))
    assert "choice" not in rows and told["choice"] == "kept 1 of 2 correct; 1 is slower"
    assert rows["training loss, first to last"] == "2.750 to 1.750 (4 steps)"
    assert rows["recorded, custom kernel"].startswith(
        "Exec@1 75.0 % (19.2 to 100.0), fast_1@1 75.0 %"
    )
    assert (
        rows["tuned, custom kernel"] == "Exec@1 0.0 % (0.0 to 63.7), fast_1@1 0.0 % (0.0 to 63.7)"
    )


def test_the_headline_tells_the_outcome():
    line = headline(context())
    assert "Of 6 candidates on 3 tasks, 2 proved correct" in line
    assert "2.750 to 1.750" in line
    rates = (
        "4 held-out tasks (Exec@1): recorded (answers that ship with concur) 75.0 %,"
        " base (tiny, not trained here) 0.0 %, tuned (tiny, trained on this set) 0.0 %"
    )
    assert rates in line


def test_the_demos_zeros_are_explained_where_they_are_first_read():
    said = "base and tuned: a small model with random weights, which cannot write a program"
    demo = context(base_model="small")
    assert said in headline(demo) and said not in headline(context())
    assert "cannot write a program" in dict(summary_table(demo))["base and tuned"]
    assert "base and tuned" not in dict(summary_table(context()))
    answered = [row | {"value": 0.5} for row in demo.scores]
    assert "random weights" not in headline(context(base_model="small", scores=answered))


def test_the_pretrained_demo_says_what_its_score_does_not_show():
    said = "says nothing of other tasks or models"
    assert said in headline(context(base_model="small-pretrained"))
    assert said in dict(summary_table(context(base_model="small-pretrained")))["base and tuned"]
    assert said not in headline(context(base_model="small"))
    unscored = [row for row in context().scores if row["model"] == "recorded"]
    assert said not in headline(context(base_model="small-pretrained", scores=unscored))


def test_a_model_that_wrote_the_candidates_is_named_and_not_taken_for_a_scored_one():
    asked = context(config={"synthesis": {"model": "my-model"}})
    assert headline(asked).startswith("Of 6 candidates by my-model on 3 tasks, 2 proved correct")
    said = "my-model, which wrote the candidates, is not among the models that are scored"
    assert said in "".join(cautions(asked)) and said not in "".join(cautions(context()))


def test_what_is_slow_in_the_training_set_is_on_the_first_screen_once():
    slow = "1 of 1 kept sample is slower than the reference"
    told = context(choice=("kept 1 of 2 correct", slow), notes=[f"{slow}: --set x", "another"])
    said = list(cautions(told))
    assert f"Training set: {slow}." in said and "another" in said
    assert sum(slow in each for each in said) == 1
    assert slow in build_report(told).split("Details")[0]


def test_a_wide_table_breaks_its_intervals_and_a_narrow_one_does_not():
    page = build_report(context())
    narrow, wide = page.split('<table class="wide">')[:2]
    assert "(19.2\u00a0to\u00a0100.0)" in narrow and "(19.2 to 100.0)" in wide.split("</table>")[0]


def test_scores_have_no_column_that_repeats_another():
    plain = scores_table(context().scores)
    assert "fast_0" not in plain.header and "against" not in plain.header
    assert {"Exec", "fast_1", "k"} <= set(plain.header)
    compiled = [row | {"baseline": "compile"} for row in context().scores]
    assert "against" in scores_table([*context().scores, *compiled]).header


@pytest.mark.parametrize("render", [build_report, to_markdown])
def test_page_and_markdown_hold_the_same_facts(render):
    text = render(context())
    shown = Page(text).words if text.startswith("<!doctype") else text
    shown = html.unescape(shown)
    assert [fact for fact in SAID.strip().splitlines() if fact not in shown] == []


def test_a_run_without_training_or_benchmark_says_so():
    bare = ReportContext(run_name="r", language="cuda", tasks=0, candidates=0)
    assert ("training loss, first to last", "not trained") in summary_table(bare)
    assert "No benchmark was run." in Page(build_report(bare)).words
    assert "No benchmark was run." in to_markdown(bare)
    assert figures(bare) == {}
    assert "No sign of a model that went wrong" in to_markdown(bare)
    assert "Reasoning length" not in to_markdown(bare)


def test_whether_to_trust_it_follows_from_the_data():
    def cautions(**changes):
        return "\n".join(json.loads(to_json(context(**changes)))["cautions"])

    said = cautions()
    assert "4 tasks per model" in said and "Not one correct kernel: base, tuned." in said
    assert "on the same CPU" in said and "on the same CPU" not in cautions(language="cuda")
    assert "demo's small model" not in said
    assert "demo's small model, whose random output layer" in cautions(base_model="small")
    many = [row | {"tasks": 100} for row in context().scores]
    assert "tasks per model" not in cautions(scores=many)


@pytest.mark.parametrize(
    "steps, losses",
    [
        ([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], (2.0, 1.0)),
        ([{"step": 1, "epoch": 3.0, "loss": 2.0}], (2.0, 2.0)),
        ([{"step": n, "epoch": n / 2, "loss": 3.0 - n} for n in (1, 2)], (2.0, 1.0)),
        ([], None),
    ],
)
def test_loss_compares_epochs_and_falls_back_to_steps(steps, losses):
    assert context().losses == (2.75, 1.75)
    assert context(history=steps).losses == losses


def words(**changes):
    return html.unescape(to_markdown(context(**changes)))


def test_what_next_holds_signs_and_typical_errors():
    slow = frame(*(verdict("tuned", f"h{i}", 0.5, number=n) for i in range(40) for n in range(2)))
    text = words(signs=signs(scores(slow), pl.DataFrame(), slow, {}))
    sentence = (
        "tuned: many correct kernels (Exec@1 100.0%), few of them fast (fast_1@1 0.0%, mean speedup"
        " 0.50)"
    )
    assert f"| tuned | correct but slow | {sentence}" in text
    first = text[: text.index("## Details")]
    assert f"- {sentence}" in first
    assert (
        "commonest failure to build or run of answers in the benchmark, 16 times: '…' was not"
        " declared in this scope" in first
    )
    assert (
        "| '…' was not declared in this scope | build_failed | 16 | 4 | base 8, tuned 8 | base,"
        " tuned |" in text
    )
    assert "Signs and failures" not in words(signs=(), errors=())
    demo = words(signs=signs(scores(slow), pl.DataFrame(), slow, {}), base_model="small")
    assert f"- {sentence}" not in demo and "training.base_model" in demo


def test_no_difference_is_one_sentence_and_limits_beyond_a_screen_are_folded():
    same = [
        row | {"difference": 0.0, "lower": None, "upper": None} for row in context().comparisons
    ]
    assert "recorded minus base: no difference on any task (Exec@1, fast_1@1)." in words(
        comparisons=same
    )
    first, rest = words(notes=[f"note {n}" for n in range(9)]).split("## Details")
    assert "note 4" in first and "note 5" not in first
    assert "### More limits" in rest and "- note 8" in rest


def test_scores_are_shown_by_group():
    said = words()
    assert "| level | model | tasks | Exec@1 | fast_1@1 |" in said
    assert "| 1 | recorded | 2 | 50.0 % (0.0 to 100.0) |" in said
    assert "| 2 | recorded | 2 | 100.0 %" in said
    assert "By level" not in words(groups=())


def test_families_and_thirds_are_tables_of_their_own():
    families = pl.DataFrame(
        [(f"h{i % 4}", f"family_{i:02}") for i in range(20)], ["task_id", "group"], orient="row"
    )
    thirds = pl.DataFrame({"task_id": ["h0", "h1", "h2"], "group": ["short", "middle", "long"]})
    rows = grouped(HELD_OUT, families, "operator_family") + grouped(HELD_OUT, thirds, "arl_third")
    said = words(groups=rows, arl_of="recorded")
    assert "| operator family | model | tasks | Exec@1 |" in said
    assert "| family 15 | recorded | 1 |" in said
    assert "| family 16 |" not in said
    assert "The 16 largest of 20 groups; the JSON has them all." in said
    assert "| reasoning | model | tasks |" in said and "| long | recorded | 1 | 100.0 %" in said
    assert "mean length of recorded's reasoning" in said
    assert "recorded itself is not scored by them" in said
    data = json.loads(to_json(context(groups=rows)))
    assert len({row["group"] for row in data["groups"]}) == 23


def test_every_score_is_in_one_table():
    compiled = [row | {"baseline": "compile"} for row in facts()["scores"]]
    text = words(scores=[*compiled, *facts()["scores"]])
    assert "| model | track | against | k | tasks | samples | Exec |" in text
    assert "| recorded | custom kernel | torch.compile | 1 | 4 | 8 | 75.0 %" in text
    assert "| recorded | custom kernel | eager PyTorch | 5 | 4 | 8 | n/a |" in text


def test_differences_have_their_p_and_a_corrected_one():
    together = paired_differences(frame(*HELD_OUT), resamples=100).to_dicts()
    alone, many = words(), words(comparisons=together)
    assert "| recorded minus base | Exec@1 | +75.0" in alone
    # 2 of 8 sign patterns, two metrics
    assert "| not distinguishable from chance | 0.250 | 0.500 | 4 |" in alone
    assert "| 1.000 |" not in alone and "| 1.000 | 1.000 |" in many


def test_candidates_are_timed_where_they_can_be():
    assert speedups_of(frame(*LINE)) == {"timed": 2, "faster": 1}
    assert speedups_of(frame(row("m", "t", float("inf")))) == {"timed": 0, "faster": 0}


def test_the_first_screen_answers_three_questions_and_the_rest_is_folded():
    page = build_report(context())
    titles = re.findall(r'<h2 id="([^"]+)">', page)
    assert titles == ["what-this-run-found", "may-you-trust-it", "what-next", "details"]
    first, rest = page.split('<h2 id="details">')
    assert "<details" not in first and "<img" not in first and first.count("<table>") == 1
    assert "recorded" in first and ">base<" in first, "a zero is an answer"
    outside = re.sub(r"<details>.*</details>", "", rest, flags=re.DOTALL)
    assert "<p>" not in outside and "<table>" not in outside
    assert "base, tuned" in page and "| base | custom kernel |" in to_markdown(context())


# -- strangers' text stays text --------------------------------------------------------------------


def test_hostile_text_adds_no_tag_and_no_attribute_and_cannot_act():
    page = Page(build_report(hostile()))
    assert_tame(page)
    tags = "html head meta title style body h1 h2 section p ul li div details summary pre"
    tables = "table thead tbody tr th td figure img figcaption"
    assert {tag for tag, _ in page.tags} == {*tags.split(), *tables.split()}
    attributes = {name for _, found in page.tags for name in found}
    known = "lang charset name content http-equiv class scope alt src id"
    assert attributes <= set(known.split())
    assert page.words.count("<script>alert(1)</script>") > 10  # shown, as text


@pytest.mark.parametrize("name", ["$\\frac{$ $x_1$", "<script>"])
def test_a_name_that_looks_like_a_formula_or_markup_is_drawn_as_it_is(name):
    rows = [row | {"model": name} for row in facts()["scores"]]
    assert html.escape(name, quote=False) in figures(context(scores=rows))["scores"]


@pytest.mark.parametrize("render", [build_report, to_markdown, to_json])
def test_no_control_or_invisible_character_survives(render):
    text = render(hostile())
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", text
    )
    assert "x1b" in text or "u001b" in text


def test_the_terminal_gets_no_control_characters_either():
    for name, value in summary_table(hostile()):
        assert (name + value).isprintable()


def test_hostile_text_is_no_markdown():
    lines = to_markdown(hostile()).split("\n")
    prose = [line for line in lines if not line.startswith("    ")]
    assert not [line for line in prose if re.search(r"[<`\[]|://|www\.", line)]
    assert not [line for line in prose if line.startswith("#") and not re.match(r"#{1,3} ", line)]
    assert_whole_tables("\n".join(prose), 8)


def test_clean_shows_what_would_act():
    assert clean("a\x1b[2J\u202eb\u200b") == "a\\x1b[2J\\u202eb\\u200b"
    assert clean("a\r\nb\n\tc") == "a\nb\n\tc"
    assert clean("a\r\nb", one_line=True) == "a b"
    assert clean("\ud800") == "\\ud800"
    assert clean("Ωmega ≥ 1") == "Ωmega ≥ 1"


def test_passwords_in_urls_are_masked_everywhere():
    made = context(
        config={
            "tracking": {"uri": "postgresql://user:s3cret@db/mlflow"},
            "urls": ["http://a:s3c:r@t@host:80/x", "http://host:80/y@z"],
        }
    )
    for text in (build_report(made), to_markdown(made), to_json(made)):
        assert "s3c" not in text
    assert made.config["tracking"]["uri"] == "postgresql://user:***@db/mlflow"
    assert made.config["urls"] == ["http://a:***@host:80/x", "http://host:80/y@z"]


# -- the page stands alone -------------------------------------------------------------------------


def test_the_page_loads_nothing():
    page = Page(build_report(context()))
    assert_tame(page)
    assert sum(tag == "img" for tag, _ in page.tags) == 2
    (policy,) = [
        found["content"]
        for _, found in page.tags
        if found.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")


def test_figures_follow_the_colour_scheme():
    drawn = figures(context())
    assert set(drawn) == {"training_loss", "scores"}
    for svg in drawn.values():
        assert "prefers-color-scheme:dark" in svg and "currentColor" in svg
        assert INK not in svg and not re.search(r"(fill|stroke): ?#(000000|ffffff)", svg)
    assert "prefers-color-scheme:dark" in build_report(context())


def test_json_is_plain_and_complete():
    made = context(history=[TrainingStep(step=1, loss=math.nan), TrainingStep(step=2, loss=1.5)])
    data = json.loads(to_json(made), parse_constant=lambda name: pytest.fail(name))
    assert data["history"][0]["loss"] is None
    assert set("headline summary cautions scores fingerprints".split()) <= set(data)
    again = ReportContext(**{name: data[name] for name in ReportContext.model_fields})
    assert again.scores == made.scores
    assert to_json(hostile()).isascii()
