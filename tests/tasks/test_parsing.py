"""Responses as models really write them, then anything at all: parsing never fails and never takes
long."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.records import REASONS, Candidate, Language, Status
from tasks.synthesis.parsing import is_unfinished, parse_response
from tests.support.cases import cases

CASES = cases("parsing")

MODULE = (
    "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x"
    " + 1\n"
)
DRAFT = MODULE.replace("x + 1", "x + 2")
HELPER = "def helper(x):\n    return x"


def fenced(code, tag="python", fence="```"):
    return f"{fence}{tag}\n{code.rstrip()}\n{fence}"


def parts(parsed):
    return parsed.reasoning, parsed.code or "", parsed.parse_reason


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\nAdd one.\n</think>\n\nHere:\n{fenced(MODULE)}\nDone.",
        f"Add one.\n</think>\n{fenced(MODULE)}",
        f"The kernel must be fast.\n\n\n<think>\nAdd one.\n</think>\n{fenced(MODULE)}",
        f"<think>Add one.</think>{fenced(MODULE)}",
    ],
)
def test_reasoning_stands_before_the_closing_tag(text):
    assert parts(parse_response(text)) == ("Add one.", MODULE, None)


def test_reasoning_that_the_server_separated_is_kept_and_its_drafts_do_not_count():
    parsed = parse_response(
        "No kernel is needed.", reasoning=f"Add two.\n{fenced(DRAFT)}\nNo.", finish_reason="stop"
    )
    assert (parsed.answer, parsed.parse_reason) == ("No kernel is needed.", "no_code_block")
    assert parts(parse_response(fenced(MODULE), reasoning="Add one.")) == ("Add one.", MODULE, None)
    assert (
        parse_response(f"<think>Add one.</think>{fenced(MODULE)}", reasoning="").reasoning
        == "Add one."
    )


def test_drafts_in_the_reasoning_never_count_beside_an_answer():
    parsed = parse_response(f"<think>\n{fenced(DRAFT)}\n</think>\n{fenced(MODULE)}")
    assert parsed.code == MODULE
    assert (
        parse_response(
            f"<think>\n{fenced(DRAFT)}\nBut that is wrong.\n</think>\nThat is all."
        ).parse_reason
        == "no_code_block"
    )


@pytest.mark.parametrize("tail", ["", "\n\n", "\n</think>\n"])
@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_a_module_that_the_reasoning_ends_with_is_the_answers_where_that_only_speaks_of_it(
    tail, finish_reason
):
    expected = ("Add one.", f"{fenced(MODULE)}\n\nThe code above adds `one`.", MODULE)
    thought, answer = f"Add one.\n\n{fenced(MODULE)}{tail}", "\n\nThe code above adds `one`."
    for parsed in (
        parse_response(f"<think>\n{thought}</think>{answer}", finish_reason=finish_reason),
        parse_response(f"{thought}\n</think>{answer}", finish_reason=finish_reason),
        parse_response(answer, reasoning=thought, finish_reason=finish_reason),
    ):
        assert (parsed.reasoning, parsed.answer, parsed.code) == expected


@pytest.mark.parametrize(
    "thought, answer, finish_reason, reason",
    CASES["a_draft_stays_one_where_the_answer_holds_code_or_breaks_off"],
)
def test_a_draft_stays_one_where_the_answer_holds_code_or_breaks_off(
    thought, answer, finish_reason, reason
):
    assert (
        parse_response(
            f"<think>{thought}</think>{answer}", finish_reason=finish_reason
        ).parse_reason
        == reason
    )
    assert (
        parse_response(answer, reasoning=thought, finish_reason=finish_reason).parse_reason
        == reason
    )


@pytest.mark.parametrize("preamble", ["", "The kernel must be fast.\n\n"])
@pytest.mark.parametrize("finish_reason", [None, "length"])
def test_reasoning_never_closed_is_truncated_whatever_it_drafts(preamble, finish_reason):
    parsed = parse_response(
        f"{preamble}<think>\nPerhaps\n{fenced(DRAFT)}\nWait,", finish_reason=finish_reason
    )
    assert (parsed.code, parsed.parse_reason, parsed.answer) == (None, "truncated", "")
    assert parsed.reasoning.startswith("Perhaps") and DRAFT in parsed.reasoning


def test_without_tags_the_last_module_is_taken_and_the_reasoning_ends_where_it_begins():
    thought, answer = (
        f"First try:\n{fenced(DRAFT)}\nBetter:",
        f"{fenced(MODULE)}\nUsage:\n{fenced('ModelNew()')}",
    )
    parsed = parse_response(f"{thought}\n{answer}")
    assert (parsed.reasoning, parsed.answer, parsed.code) == (thought, answer, MODULE)


BROKEN = MODULE + "    def (\n"  # a syntax error is for the verifier to find
ENDS_WITH_REASONING = f"Add one.\n{fenced(MODULE)}\n</think>\n"


@pytest.mark.parametrize("finish_reason", [None, "stop", "length"])
@pytest.mark.parametrize("text, code", CASES["fences_as_models_write_them"])
def test_fences_as_models_write_them(text, code, finish_reason):
    assert parse_response(text, finish_reason=finish_reason).code == code


@pytest.mark.parametrize("text", [MODULE, f"\n\n{MODULE}\n", ENDS_WITH_REASONING])
def test_a_module_without_a_fence_or_an_answer_counts_unless_it_was_cut_off(text):
    assert parse_response(text).code == MODULE
    assert parse_response(text, finish_reason="length").parse_reason == "truncated"


@pytest.mark.parametrize("text, finish_reason, reason", CASES["why_there_is_no_code"])
def test_why_there_is_no_code(text, finish_reason, reason):
    assert parse_response(text, finish_reason=finish_reason).parse_reason == reason


def test_what_stopped_at_the_limit_before_any_tag_is_all_reasoning():
    parsed = parse_response("Let me think about tiles.", finish_reason="length")
    assert parts(parsed) == ("Let me think about tiles.", "", "truncated") and not parsed.answer


@pytest.mark.parametrize(
    "text, unfinished", CASES["a_recorded_response_that_breaks_off_is_noticed"]
)
def test_a_recorded_response_that_breaks_off_is_noticed(text, unfinished):
    assert is_unfinished(text) is unfinished


def test_what_cannot_be_stored_is_replaced():
    parsed = parse_response(f"\ud800 think</think>{fenced(MODULE + '# ' + chr(0) + chr(0xDFFF))}")
    assert parsed.code is not None and parsed.code.startswith(MODULE)
    (parsed.reasoning + parsed.answer + parsed.code).encode("utf-8")


ALIAS = MODULE.replace("ModelNew", "Fast") + "\nModelNew = Fast\n"
QUOTED = "".join(f"> {line}\n" for line in MODULE.splitlines())
NAMES = {
    "MODULE": MODULE,
    "DRAFT": DRAFT,
    "HELPER": HELPER,
    "ALIAS": ALIAS,
    "QUOTED": QUOTED,
    "REMARK": ALIAS.strip() + "  # the fast one\n",
    "TYPED": ALIAS.replace("ModelNew =", "ModelNew: type ="),
    "IMPORTED": "from fast import Fast as ModelNew\n",
    "FUNCTIONAL": "def ModelNew(x):\n    return x + 1\n",
    "ECHO": f"#| echo: false\n{MODULE}",
}


def spelled(text):
    for name, code in NAMES.items():
        for end in ("\n", "```"):
            text = text.replace(f"{name}{end}", f"{code.strip()}{end}")
    return text


@pytest.mark.parametrize("family, text, finish_reason, reasoning, code, reason", cases("answers"))
def test_answers_of_model_families(family, text, finish_reason, reasoning, code, reason):
    parsed = parse_response(spelled(text), finish_reason=finish_reason)
    assert (parsed.reasoning, parsed.parse_reason) == (spelled(reasoning), reason)
    assert parsed.code == (NAMES[code] if code else None)
    assert not re.search(
        r"[<\[◁]\W?(seed:)?(think|channel|message|answer|START|END)", parsed.answer
    )


def check_invariants(text, reasoning, finish_reason):
    parsed = parse_response(text, reasoning=reasoning, finish_reason=finish_reason)
    assert (parsed.code is None) != (parsed.parse_reason is None)
    assert parsed.parse_reason is None or parsed.parse_reason in REASONS[Status.NO_CODE]
    assert parsed.code is None or "ModelNew" in parsed.code
    facts = {
        "reasoning": parsed.reasoning,
        "code": parsed.code,
        "parse_reason": parsed.parse_reason,
    }
    Candidate(candidate_id="c", task_id="t", language=Language.CPP, generator="g", **facts)


ANY_TEXT = st.text(st.characters(), max_size=300)
FINISH = st.sampled_from([None, "stop", "length", "content_filter"])
PIECES = st.sampled_from(
    [
        "```",
        "````",
        "~~~",
        "```python",
        "``` cpp",
        "    ```",
        "<think>",
        "</think>",
        "\n",
        "\r\n",
        "`",
        " ",
        "\x00",
        "�",
        "prose",
        "class ModelNew:\n    pass\n",
        "class ModelNew(",
        "x = '''",
        "def f(:\n",
        MODULE,
        fenced(MODULE),
        fenced(HELPER),
    ]
)


@given(ANY_TEXT, st.none() | ANY_TEXT, FINISH)
def test_any_text_is_parsed(text, reasoning, finish_reason):
    check_invariants(text, reasoning, finish_reason)


@given(st.lists(PIECES, max_size=40), st.none() | st.lists(PIECES, max_size=6).map("".join), FINISH)
@settings(max_examples=100)
def test_fence_soup_is_parsed(pieces, reasoning, finish_reason):
    check_invariants("".join(pieces), reasoning, finish_reason)


@given(st.lists(PIECES, max_size=20).map("".join), st.sampled_from(["stop", "length", None]))
@settings(max_examples=60)
def test_a_clean_answer_behind_any_closed_reasoning_is_found(soup, finish_reason):
    assert (
        parse_response(f"{soup}</think>\n{fenced(MODULE)}\n", finish_reason=finish_reason).code
        == MODULE
    )


UNTAGGED = st.lists(PIECES.filter(lambda piece: "think>" not in piece), max_size=20).map("".join)


@given(UNTAGGED.filter(str.strip), UNTAGGED, FINISH)
@settings(max_examples=60)
def test_it_does_not_matter_who_separates_the_reasoning(reasoning, answer, finish_reason):
    separated = parse_response(answer, reasoning=reasoning, finish_reason=finish_reason)
    for raw in (f"<think>\n{reasoning}\n</think>\n{answer}", f"{reasoning}\n</think>\n{answer}"):
        assert parse_response(raw, finish_reason=finish_reason) == separated


@pytest.mark.parametrize(
    "text",
    [
        "`" * 5_000_000,
        ("`" * 999 + "x") * 5_000,
        "```\n" * 200_000,
        "```python\nclass ModelNew:\n" * 50_000,
        "</think>" * 200_000,
        "\n<think>" * 200_000,
        " " * 5_000_000,
        "class ModelNew\n" * 100_000,
        fenced("class ModelNew: pass\nx = " + "(" * 2_000_000),
        fenced("class ModelNew: pass\nx = a" + "+a" * 200_000),
        fenced("class ModelNew: pass\n" + "x = 1\n" * 800_000),
        fenced("class ModelNew(\n") * 20_000 + "</think>" * 200_000 + "That is all.",
        fenced(MODULE) + "\n" * 5_000_000 + "</think>That is all.",
    ],
    ids=(
        "backticks runs empty-blocks reopened closings openings spaces classes nesting deep-sum"
        " long-module late-tags late-lines".split()
    ),
)
def test_hostile_sizes_take_seconds_at_most(text):
    start = time.process_time()
    check_invariants(text, None, None)
    assert time.process_time() - start < 10  # quadratic time on any of these would take minutes
