"""Measures of traces: each flag on what it is for, and none on an ordinary trace."""

import time

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.curation.config import FLAGS
from tasks.curation.quality import MEASURES, quality
from tests.support.cases import cases

CASES = cases("curation")

GOOD = """The reference multiplies two matrices, so the kernel tiles both operands through shared \
memory.
Each block computes a tile of 16 by 16 outputs, and every thread loads one element of either \
operand per step.
Bounds matter, because 1000 is not a multiple of 16; the loads are guarded and pad with zeros.

```python
class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return module.matmul(a, b)
```

Registers hold the partial sums. That is all there is to do here.
"""
DOUBTS = (
    "Wait, the stride is wrong. Hmm, alternatively the row is. Let me check again. Actually it"
    " might be fine. "
)
LOOP = "You must keep the shape of the output and the type of the output. "


def flags(text):
    row = quality([text]).row(0, named=True)
    return {flag for flag in FLAGS if row[flag]}


def test_an_ordinary_trace_has_no_flag_and_its_numbers_are_of_the_prose():
    row = quality([GOOD]).row(0, named=True)
    assert not any(row[flag] for flag in FLAGS)
    assert row["repeated_share"] == 0 and row["loop_words"] == 0 and row["doubt_markers"] == 0
    assert row["characters"] == len(GOOD)
    prose = GOOD.split("```")[0] + GOOD.split("```")[2]
    assert row["words"] == len(prose.split())


@pytest.mark.parametrize(
    "flag, text",
    {
        "repetitive": GOOD + GOOD.split("\n\n")[0] * 8 + ".",
        "ends_in_loop": GOOD + LOOP * 30,
        "self_doubting": GOOD + DOUBTS * 6,
        "mixed_language": (
            GOOD + "\u6211\u4eec\u9700\u8981\u4f18\u5316\u8fd9\u4e2a\u6a21\u578b\u3002"
        ),
        "too_short": "Done. " * 30 + "\n```python\n" + "x = 1\n" * 99 + "```",
        "truncated": GOOD + "And then the kernel is launched with",
    }.items(),
)
def test_each_flag_is_raised_by_what_it_is_for(flag, text):
    assert flag in flags(text)
    assert flag not in flags(GOOD)


def test_a_draft_written_again_is_no_repetition_and_the_same_prose_is():
    code = (
        "```python\n"
        + "\n".join(f"value_{i} = load(pointer, {i}) + {i}" for i in range(40))
        + "\n```\n"
    )
    assert quality([GOOD + code * 6])["repeated_share"][0] == quality([GOOD])["repeated_share"][0]
    assert quality([GOOD + code.replace("`", "") * 6])["repeated_share"][0] > 0.5


@pytest.mark.parametrize("text, cut", CASES["cut_thoughts"])
def test_where_a_thought_is_cut(text, cut):
    assert ("truncated" in flags(text)) == cut


def test_the_loop_at_the_end_is_counted_in_words_whatever_its_period():
    for period in (1, 3, 14):
        loop = " ".join(f"w{i}" for i in range(period))
        row = quality(["start here and then " + " ".join([loop] * 50)]).row(0, named=True)
        assert row["loop_words"] == 50 * period
    assert quality(["one two three four five"])["loop_words"][0] == 0
    assert (
        quality([LOOP * 30 + "It ended after all, with other words than before."])["loop_words"][0]
        == 0
    )


@pytest.mark.parametrize(
    "text",
    [
        "\u6211\u4eec" * 20,
        "\u043f\u0440\u0438\u0432\u0435\u0442 " * 9,
        "\u03b1 + \u03b2 \u2264 \u03b3 \u00d7 2 is the bound.",
    ],
)
def test_one_language_or_greek_in_formulas_is_no_mixture(text):
    assert quality([text])["foreign_letters"][0] == 0


def test_the_words_waiting_and_awaited_are_no_doubt():
    assert (
        quality(["The waiting thread awaited the await; an actual hmmer profile."])[
            "doubt_markers"
        ][0]
        == 0
    )
    assert quality(["Wait. ACTUALLY, hmmm: no, alternatively..."])["doubt_markers"][0] == 5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.text(max_size=300), st.just(GOOD), st.just(LOOP * 5)), max_size=6
    )
)
def test_a_row_depends_on_its_text_alone(texts):
    together = quality(texts)
    assert together.columns == [*MEASURES, *FLAGS]
    assert together.height == len(texts)
    for i, text in enumerate(texts):
        assert together.row(i) == quality(pl.Series([text], dtype=pl.String)).row(0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "text",
    [
        "a" * 4_000_000,
        "a " * 2_000_000,
        "\n" * 4_000_000,
        "```\n" * 1_000_000,
        "** " * 1_000_000,
        "\u6f22" * 2_000_000,
    ],
)
def test_time_is_linear_in_hostile_text(text):
    def seconds(part):
        started = time.process_time()
        quality([part])
        return time.process_time() - started

    seconds("warm")
    quarter = min(seconds(text[: len(text) // 4]) for _ in range(2))
    assert seconds(text) < 12 * quarter + 2  # four times the text; quadratic would be sixteen times
