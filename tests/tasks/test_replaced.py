"""Which operators a candidate replaced, read from its source, and what is said of it. Nothing here
runs a candidate."""

import polars as pl
import pytest

from tasks.benchmark.diagnosis import Evidence, diagnose, replaced
from tasks.benchmark.replaced import called_operators, operator_key, replaced_share
from tasks.benchmark.scoring import ScoreRow
from tasks.sources import bundled
from tasks.synthesis.parsing import parse_response
from tests.support.cases import cases

CASES = cases("benchmark")

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

ext = load_inline(name="e", cpp_sources=r'''torch::Tensor softmax(torch::Tensor x) { return \
NATIVE; }''', functions=["softmax"])
"""


def source(forward, init="pass", extra="", native="x"):
    lines = [
        HEAD.replace("NATIVE", native),
        extra,
        "class ModelNew(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
    ]
    lines += [*(f"        {line}" for line in init.splitlines()), "    def forward(self, x):"]
    return "\n".join([*lines, *(f"        {line}" for line in forward.splitlines())])


def called(forward, **parts):
    found = called_operators(source(forward, **parts))
    assert found is not None
    return found


@pytest.mark.parametrize("forward, parts, keys", CASES["left_to_torch"])
def test_what_is_still_left_to_torch(forward, parts, keys):
    assert called(forward, **parts) == set(keys)


@pytest.mark.parametrize("names, count", CASES["operator_names"])
def test_names_of_one_operator_are_one(names, count):
    assert len({operator_key(name) for name in names.split()}) == count


def test_shares_of_what_is_gone():
    shares = {"linear": 0.7, "gelu": 0.2, "view": 0.1}
    # a view is not there to be replaced
    gone = called("return ext.softmax(x)")
    assert replaced_share(shares, gone) == (pytest.approx(0.9), True)
    kept = called("return ext.softmax(F.linear(x, self.w))")
    assert replaced_share(shares, kept) == (pytest.approx(0.2), False)
    for nothing in ({"view": 1.0}, {}):
        assert replaced_share(nothing, frozenset()) == (0.0, False)


@pytest.mark.parametrize("bad", ["", "class ModelNew(", "class Other: pass", "x = 1\0"])
def test_what_cannot_be_read_is_none(bad):
    assert called_operators(bad) is None


def test_calls_in_a_circle_end():
    assert called(
        "return a(x)", extra="def a(x):\n    return b(x).exp()\ndef b(x):\n    return a(x)"
    ) == {"exp"}
    base = "class ModelNew(ModelNew):\n    pass"
    assert called_operators(base) == frozenset()


def code_of(task, number, language="cpp"):
    code = parse_response(bundled.responses(task, language)[number]).code
    assert code is not None
    return code


SPENT = CASES["spent"]


def test_recorded_answers_that_fuse_and_one_that_falls_back():
    """Answer 2 calls its own kernel for some widths and torch for the others: read as kept, since
    who reads cannot know which."""
    spent = SPENT["bundled/group_norm_swish"]
    shares = [
        replaced_share(spent, called_operators(code_of("group_norm_swish", n)) or ())
        for n in range(5)
    ]
    assert [main for _, main in shares] == [True, True, False, True, True]
    assert shares[0][0] == pytest.approx(1.0) and shares[2][0] == 0.0


def verdicts(*answers):
    return pl.DataFrame(
        {"model": "m", "task_id": f"bundled/{task}", "status": status, "reason": "ok"}
        | {"code": code_of(task, number)}
        for task, number, status in answers
    )


def test_the_sentence_holds_its_numbers():
    answers = [("group_norm_swish", n, "correct") for n in range(5)] + [
        ("linear_gelu", n, "correct") for n in (1, 2, 4)
    ]
    made = verdicts(*answers, ("linear_gelu", 3, "incorrect"))
    found = replaced("m", made, SPENT)
    assert found.sign == "replaced"
    assert found.numbers["share"] == pytest.approx(7 / 8), "of the correct answers"
    assert found.numbers["main_operator_share"] == pytest.approx((5 * 0.4 + 3 * 0.74) / 8)
    assert found.numbers["replaced_time_share"] == pytest.approx(7 / 8)
    assert found.numbers["lower"] < 7 / 8 < found.numbers["upper"]
    assert found.numbers["answers_count"] == 8 and "Read from the source" in found.sentence


def test_too_few_answers_or_no_profile_say_nothing():
    few = verdicts(*(("linear_gelu", n, "correct") for n in (1, 2, 4)))
    assert replaced("m", few, SPENT) is None
    many = verdicts(*(("group_norm_swish", n, "correct") for n in range(5)))
    assert replaced("m", many, {}) is None and replaced("m", many.drop("code"), SPENT) is None
    scored = [ScoreRow(model="m", track="any", metric="exec", tasks=1, samples=5)]
    found = diagnose(scored, Evidence(verdicts=many, time_by_operator=SPENT))
    assert [each.sign for each in found] == ["replaced"]
    assert diagnose(scored, Evidence(verdicts=many)) == ()
