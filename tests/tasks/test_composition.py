"""What training sets hold: parts add up, and everyone can read the figure."""

from itertools import combinations

import pytest

from flows.set_figures import task_families, write_figures
from kernels_eval.errors import UsageError
from tasks.observe.composition import (
    Quantiles,
    SetComposition,
    composition,
    leading_family,
    markdown_table,
)
from tasks.observe.composition_figure import composition_figure
from tests.support.cases import cases
from tests.support.drawings import assert_readable
from tests.support.samples import FUSION, SINGLE, frame, sample, samples

CASES = cases("analysis")

RELU = ["torch.nn.functional.relu"]
ROWS = [
    *samples("a-0 100 - status=compile_error; a-1 101 2.0; a-2 102 2.0; a-3 103 2.0"),
    sample("b", 3, 900, 0.5, ops=RELU),
    sample("c", 0, 50, float("nan"), ops=[]),
]
CORRECT = frame(*(row for row in ROWS if row["status"] == "correct"))
FAMILIES = task_families(frame(*ROWS))


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
    assert composition("untimed", CORRECT.tail(1), FAMILIES).speedups is None


def test_the_table_has_a_row_a_set():
    held = [composition(name, CORRECT.head(n), FAMILIES) for name, n in (("one", 2), ("two", 4))]
    text = markdown_table(held)
    assert "| one | 2 | 1 |" in text and "| two | 4 | 2 |" in text


# -- the figure ------------------------------------------------------------------------------------


def many(sets=12, tasks=30):
    operators = [
        *(SINGLE, FUSION, RELU, ["torch.conv2d"], ["torch.sum"]),
        *(["torch.nn.functional.batch_norm"], ["torch.cumsum"], []),
    ]
    rows = [
        sample(f"t{task}", n, 100 * n + task, 0.2 * (n + 1), ops=operators[task % len(operators)])
        for task in range(tasks)
        for n in range(5)
    ]
    verdicts = frame(*rows)
    families = task_families(verdicts)
    found = []
    for number in range(sets):
        taken = verdicts.sample(10, seed=number, shuffle=True)
        found.append(composition(f"strategy_with_a_long_name_{number}", taken, families))
    return found


def test_the_figure_reads_on_white_and_on_black_and_says_its_n(tmp_path):
    drawn = composition_figure(many(6, 16))
    assert_readable(drawn, tmp_path)
    assert "n is the number of samples" in str(drawn.figure._supxlabel.get_text())


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
    facts = {"samples": 214_638, "tasks": 180_000, "tokens": tokens, "speedups": speedups}
    facts |= dict.fromkeys(("single_operator", "fusion"), 107_319)
    return [
        SetComposition(name=f"set_{number}", families={"matmul": 214_638}, **facts)
        for number in range(3)
    ]


@pytest.mark.parametrize("size", [(12, 16), (1, 10), (16, 8), None], ids=str)
def test_no_letters_lie_over_others_or_leave_the_picture(size):
    drawn = composition_figure(many(*size) if size else paper_scale())
    boxes = boxes_of(drawn)
    assert len(boxes) > 5
    width, height = drawn.figure.canvas.get_width_height()
    for name, box in boxes.items():
        inside = box.x0 > -2 and box.y0 > -2 and box.x1 < width + 2 and box.y1 < height + 2
        assert inside, (name, box)
    for (first, a), (second, b) in combinations(boxes.items(), 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < 1.5 or down < 1.5, (first, second)


def test_a_figure_of_little_or_nothing():
    nothing = composition("none", CORRECT.clear(), FAMILIES)
    assert "0 samples of 0 tasks" in composition_figure([nothing]).alt


def test_the_same_sets_give_the_same_bytes(tmp_path):
    figures = many(3, 8)
    written = [write_figures(figures, tmp_path / name) for name in ("first", "second")]
    first, second = ({path.name: path.read_bytes() for path in paths} for paths in written)
    assert first == second and len(first) == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_figures(many(1, 10), tmp_path / "file")
