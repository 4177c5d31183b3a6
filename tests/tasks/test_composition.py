"""Tables of statuses, sets and what sets share, and their figures: parts add up, and everyone can
read them."""

from itertools import combinations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.set_figures import Figures, task_families
from kernels_eval.errors import UsageError
from tasks.analysis.composition import (
    STATUSES,
    Quantiles,
    SetComposition,
    composition,
    leading_family,
    markdown,
    overlap,
    status_by_family,
)
from tasks.analysis.composition_figures import (
    FAMILY_LOOKS,
    OTHER,
    STATUS_LOOKS,
    composition_figure,
    overlap_figure,
    status_figure,
)
from tasks.reporting.charts import LOOKS, Look
from tests.support.cases import cases
from tests.support.drawings import assert_readable, linear
from tests.support.samples import FUSION, SINGLE, frame, sample, samples

CASES = cases("analysis")

RELU = ["torch.nn.functional.relu"]
ROWS = [
    *samples("a-0 100 - status=compile_error; a-1 101 2.0; a-2 102 2.0; a-3 103 2.0"),
    *(
        row | {"reference_operators": []}
        for row in samples(
            "b-0 300 - status=no_code; b-1 300 - status=no_code; b-2 300 - status=no_code"
        )
    ),
    sample("b", 3, 900, 0.5, ops=RELU),
    sample("c", 0, 50, float("nan"), ops=[]),
]
CORRECT = frame(*(row for row in ROWS if row["status"] == "correct"))
FAMILIES = task_families(frame(*ROWS))


def test_statuses_of_families_add_up_and_a_task_without_operators_is_unknown():
    verdicts = frame(*ROWS)
    found = status_by_family(verdicts, FAMILIES)
    shown = [[row.family, row.tasks, row.candidates, row.counts] for row in found]
    assert shown == CASES["statuses"]
    twice = pl.concat([verdicts, verdicts])
    assert status_by_family(twice, FAMILIES) == found  # a candidate counts once
    for lost, said in ((verdicts.drop("status"), "status"), (verdicts.clear(), "names a task")):
        with pytest.raises(UsageError, match=said):
            status_by_family(lost, FAMILIES)


@pytest.mark.parametrize("families, leading", CASES["leading_families"])
def test_the_leading_family_is_what_a_kernel_mostly_computes(families, leading):
    assert leading_family(families.split()) == leading


def test_what_a_set_holds():
    found = composition("mine", CORRECT, FAMILIES)
    assert (found.samples, found.tasks, found.single_operator, found.fusion) == (5, 3, 1, 4)
    assert found.families == {"matmul": 3, "activation": 1, "unknown": 1}
    assert (found.tokens.n, found.tokens.median) == (5, 102.0)
    # NaN is not timed
    assert (found.speedups.n, found.speedups.median) == (4, 2.0)
    curated = pl.DataFrame({"task_id": ["a", "b"], "reasoning_tokens": [5, 7]}).with_columns(
        speedup=pl.Series([None, -1.0]), operator_kind=pl.Series(["fusion", None])
    )
    found = composition("curated", curated, FAMILIES)
    assert found.speedups is None and (found.single_operator, found.fusion) == (0, 2)
    for rows, said in (
        (CORRECT.drop("reasoning_tokens"), "reasoning_tokens"),
        (CORRECT.with_columns(reasoning_tokens=pl.lit("many")), "holds String, no numbers"),
    ):
        with pytest.raises(UsageError, match=said):
            composition("mine", rows, FAMILIES)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("a b c d e".split()), st.frozensets(st.integers(0, 12).map(str)), max_size=5
    )
)
def test_intersections_are_a_partition_that_gives_every_set_back(sets):
    found = overlap(sets)
    assert (
        sum(each.samples for each in found.intersections)
        == found.samples
        == len(frozenset().union(*sets.values()))
    )
    assert {frozenset(each.names) for each in found.sets} == {
        frozenset(name for name, other in sets.items() if other == ids) for ids in sets.values()
    }
    sizes = {name: each.samples for each in found.sets for name in each.names}
    assert sizes == {name: len(ids) for name, ids in sets.items()}
    for number, each in enumerate(found.sets):
        assert (
            sum(part.samples for part in found.intersections if number in part.sets) == each.samples
        )
    assert len(found.pairs) == len(sets) * (len(sets) - 1) // 2
    for pair in found.pairs:
        assert pair.shared == len(sets[pair.first] & sets[pair.second]) and 0 <= pair.jaccard <= 1
        assert (pair.jaccard == 1) == (sets[pair.first] == sets[pair.second] != frozenset())


def test_the_tables_name_sets_that_are_the_same_and_what_they_share():
    parts = {"one": CORRECT.head(2), "two": CORRECT.head(4), "again": CORRECT.head(2)}
    held = [composition(name, rows, FAMILIES) for name, rows in parts.items()]
    shared = overlap({name: rows["candidate_id"] for name, rows in parts.items()})
    assert [each.names for each in shared.sets] == [("two",), ("one", "again")]
    text = markdown(held, shared)
    assert "| one |  | 2 (50) | 2 (100) |" in text and "| two | 4 | 2 |" in text


# -- figures ---------------------------------------------------------------------------------------


def many(sets=12, tasks=30):
    operators = [
        SINGLE,
        FUSION,
        RELU,
        ["torch.conv2d"],
        ["torch.sum"],
        ["torch.nn.functional.batch_norm"],
        ["torch.cumsum"],
        [],
    ]
    statuses = [*STATUSES, "something_new"]
    rows = []
    for task in range(tasks):
        for index in range(5):
            status = statuses[(task + index) % len(statuses)] if index else "correct"
            ops = operators[task % len(operators)]
            rows.append(
                sample(
                    f"t{task}", index, 100 * index + task, 0.2 * (index + 1), status=status, ops=ops
                )
            )
    verdicts = frame(*rows)
    figures, correct = Figures(verdicts), verdicts.filter(pl.col("status") == "correct")
    for number in range(sets):
        figures.add(
            f"strategy_with_a_long_name_{number}", correct.sample(10, seed=number, shuffle=True)
        )
    return figures


def test_every_figure_reads_on_white_and_on_black_and_says_its_n(tmp_path):
    figures = many(6, 16).drawn()
    for drawn in figures:
        assert_readable(drawn, tmp_path)
        assert any(map(str.isdigit, caption_of(drawn))) and "n " in caption_of(drawn)
    assert [drawn.name for drawn in figures] == ["status-by-family", "composition", "overlap"]


def caption_of(drawn):
    return str(drawn.figure._supxlabel.get_text())


def boxes_of(drawn):
    """Every text that is drawn, and where (pixels)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(drawn.figure)
    canvas.draw()
    beyond = set()  # labels of ticks that lie beyond the ends of their axis are there and not drawn
    for axis in (each for axes in drawn.figure.axes for each in (axes.xaxis, axes.yaxis)):
        shown = set(axis._update_ticks()) if axis.axes.axison else set()
        beyond |= {
            label
            for tick in (*axis.majorTicks, *axis.minorTicks)
            if tick not in shown
            for label in (tick.label1, tick.label2)
        }
    texts = [
        text
        for text in drawn.figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in beyond
    ]
    return {
        f"{number} {text.get_text()}": text.get_window_extent(canvas.get_renderer())
        for number, text in enumerate(texts)
    }


def paper_scale():
    """Sets of 214,638 samples, and speedups within less than a decade."""
    speedups = Quantiles(n=200_000, p10=0.55, p25=0.8, median=1.2, p75=1.9, p90=3.1)
    tokens = Quantiles(n=214_638, p10=4_000, p25=6_000, median=9_000, p75=15_000, p90=31_000)
    facts = {"samples": 214_638, "tasks": 180_000, "tokens": tokens}
    facts |= dict.fromkeys(("single_operator", "fusion"), 107_319) | {"speedups": speedups}
    held = [
        SetComposition(name=f"set_{number}", families={"matmul": 214_638}, **facts)
        for number in range(3)
    ]
    few = overlap({"a": ["x", "y"], "b": ["y"]})
    parts = [part.model_copy(update={"samples": 214_638}) for part in few.intersections]
    large = few.model_copy(update={"intersections": tuple(parts)})
    return [composition_figure(held), overlap_figure(large)]


@pytest.mark.parametrize("what", [(12, 16), (1, 10), (16, 8), None], ids=str)
def test_no_letters_lie_over_others_or_leave_the_picture(what):
    for drawn in many(*what).drawn() if what else paper_scale():
        boxes = boxes_of(drawn)
        assert len(boxes) > 5
        width, height = drawn.figure.canvas.get_width_height()
        for name, box in boxes.items():
            assert box.x0 > -2 and box.y0 > -2 and box.x1 < width + 2 and box.y1 < height + 2, (
                drawn.name,
                name,
                box,
            )
        for (first, a), (second, b) in combinations(boxes.items(), 2):
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            down = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across < 1.5 or down < 1.5, (drawn.name, first, second)


# Viénot, Brettel and Mollon 1999: linear RGB as protanopes and deuteranopes see it
AS_SEEN = {
    "everyone": np.eye(3),
    "protanopia": np.array(CASES["protanopia"]),
    "deuteranopia": np.array(CASES["deuteranopia"]),
}
TOLD_APART = 20.0  # difference in CIE Lab; 2.3 is just noticeable side by side


def lab(colour, seen):
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    light = np.clip(seen @ linear(rgb), 0, 1)
    xyz = np.array(CASES["xyz"]) @ light / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("reader", AS_SEEN)
def test_kinds_are_told_apart_by_every_reader(reader):
    """By a colour that stays another for colour-blind readers, or by the hatch."""
    families = {f"family {number}": look for number, look in enumerate((*FAMILY_LOOKS, LOOKS[7]))}
    for looks in ({**STATUS_LOOKS, "another status": OTHER}, families):
        for (first, a), (second, b) in combinations(looks.items(), 2):
            apart = float(
                np.linalg.norm(lab(a.colour, AS_SEEN[reader]) - lab(b.colour, AS_SEEN[reader]))
            )
            assert a.hatch != b.hatch or apart > TOLD_APART, (first, second, apart)


def test_every_status_has_a_look_of_its_own():
    assert set(STATUS_LOOKS) == set(STATUSES)
    assert len(set(STATUS_LOOKS.values()) | {OTHER}) == len(STATUSES) + 1
    assert all(isinstance(look, Look) for look in STATUS_LOOKS.values())


def test_figures_of_little_or_nothing():
    figures = Figures(frame(sample("t", 0, 10, None, status="no_code", ops=[])))
    (drawn,) = figures.drawn()
    assert drawn.name == "status-by-family" and "1 no_code" in drawn.alt
    assert overlap_figure(overlap({})).alt.startswith(
        "Overlap of training sets, 0 different samples"
    )
    nothing = composition("none", CORRECT.clear(), FAMILIES)
    assert "0 samples of 0 tasks" in composition_figure([nothing]).alt
    assert status_figure(figures.statuses).alt == drawn.alt


def test_the_same_sets_give_the_same_bytes(tmp_path):
    figures = many(3, 8)
    written = [figures.write(tmp_path / name) for name in ("first", "second")]
    first, second = ({path.name: path.read_bytes() for path in paths} for paths in written)
    assert first == second and len(first) == 7


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        many(1, 10).write(tmp_path / "file")
